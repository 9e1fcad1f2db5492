"""`ingle bench --tune` with a simulated clock on an interpreted GPU, and without a GPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from app.bench.tuning import tune
from app.commands.bench import bench
from app.progress import SilentProgress
from app.settings.settings import Settings, load_settings
from engine.backends.cuda.tile_file import read_tiles
from engine.errors import UnsupportedModel
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from quant.kernels.tile_search import rule_tile
from tests.gpu.machine import DRY_CARD
from tests.support.random_gguf import SIZES, write

Calls = Sequence[Callable[[], object]]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model = tmp_path / "tiny.gguf"
    write(model, "Q4_0", replace(SIZES["tiny"], layers=1))
    return load_settings(model=str(model), cache_dir=str(tmp_path / "cache"))


class Clock:
    """A fake timer. Each measurement is faster than the one before, and the call after `until` calls is interrupted."""

    def __init__(self, until: float = float("inf")) -> None:
        self.calls, self._until = 0, until

    def __call__(self, calls: Calls) -> float:
        assert calls
        self.calls += 1
        if self.calls > self._until:
            raise KeyboardInterrupt
        return 1.0 / self.calls


def test_tuned_tiles_are_saved_and_loaded(settings: Settings) -> None:
    tuned = tune(settings, SilentProgress(), DRY_CARD, Clock())
    assert {(512, 256), (256, 512)} <= {(shape.outputs, shape.inputs) for shape in tuned.tiles}
    assert tuned.faster == sum(tile != rule_tile(shape, DRY_CARD) for shape, tile in tuned.tiles.items()) > 0
    assert read_tiles(settings.cache_dir, DRY_CARD) == tuned.tiles
    loaded = LoadOptions(backend="cuda", context_length=64, card=DRY_CARD, code_cache=settings.cache_dir)
    salts = []
    for options in (loaded, replace(loaded, code_cache=None)):
        with open_checkpoint(Path(settings.model)) as checkpoint:
            salts.append(load_engine(checkpoint, options).config.cache_salt)
    assert repr(tuned.tiles) in salts[0]
    assert repr(tuned.tiles) not in salts[1]


def test_tiles_measured_before_an_interruption_are_saved(settings: Settings) -> None:
    whole = tune(settings, SilentProgress(), DRY_CARD, counted := Clock())
    tuned_file = whole.file.read_bytes()
    whole.file.unlink()
    with pytest.raises(KeyboardInterrupt):
        tune(settings, SilentProgress(), DRY_CARD, Clock(counted.calls - 1))
    kept = read_tiles(settings.cache_dir, DRY_CARD)
    assert list(whole.tiles.items())[:-1] == list(kept.items())
    tune(settings, SilentProgress(), DRY_CARD, Clock())
    assert whole.file.read_bytes() == tuned_file


def test_tuning_without_a_gpu_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(bench, ["--tune", "-m", str(tmp_path / "none.gguf")])
    assert isinstance(result.exception, UnsupportedModel)
    assert "No GPU can be used" in str(result.exception)


def test_tune_refuses_workload_options() -> None:
    result = CliRunner().invoke(bench, ["--tune", "--suite"])
    assert result.exit_code == 2
    assert "remove --suite" in result.output
