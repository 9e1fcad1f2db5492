"""The model that is recommended on a new machine: the best in a list that fits and is fast enough on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from app.cli import ingle
from app.errors import ModelNotFound, Offline
from app.models import fit as module
from app.models.decode_rate import DecodeRate, remember_rate
from app.models.families import load_families
from app.models.fit import fit_model, recommended_fit
from app.settings.settings import Settings
from engine.kv import budget
from tests.app.models.fake_hub import FakeHub, serve
from tests.app.models.tiny_model import settings_in
from tests.engine.models.tiny_llama import make

LARGE, SMALL = "qwen3:8b", "qwen3-instruct:4b"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The contents of two GGUF files by model name, one four times as large as the other."""
    place = tmp_path_factory.mktemp("gguf")
    sizes = {LARGE: {"mlp": 768}, SMALL: {"mlp": 192, "types": {"token_embd": "Q4_0"}}}
    return {name: make(place, head_dim=32, vocab=2000, **more).path.read_bytes() for name, more in sizes.items()}  # type: ignore[arg-type]


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    families = load_families()
    with serve() as served:
        served.repositories = {
            families.models[name].repository.repo: {"model-Q4_K_M.gguf": content} for name, content in files.items()
        }
        yield served


@pytest.fixture
def settings(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(module, "machine_memory", lambda settings: 8_000_000_000)
    return settings_in(tmp_path, hub_endpoint=hub.address, device="cpu")


def test_best_model_that_fits_is_recommended(settings: Settings) -> None:
    found = recommended_fit(settings)
    assert (found.name, found.is_possible, found.is_stored) == (LARGE, True, False)


def test_smaller_model_is_recommended_if_the_larger_does_not_fit(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = (fit_model(name, settings, memory=1 << 30) for name in (LARGE, SMALL))
    monkeypatch.setattr(budget, "available_memory", lambda: (large.fit.needed + small.fit.needed) // 2)
    assert recommended_fit(settings).name == SMALL


def test_model_that_is_fast_enough_for_the_machine_is_recommended(settings: Settings) -> None:
    small = fit_model(SMALL, settings).fit.active_weights
    remember_rate(settings.state_dir, DecodeRate("cpu", 5.0 * small))
    assert recommended_fit(settings).name == SMALL
    remember_rate(settings.state_dir, DecodeRate("cuda", 5.0 * small))  # the rate of another device
    assert recommended_fit(settings).name == LARGE


def test_too_little_memory_sends_no_request(settings: Settings, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "machine_memory", lambda settings: 1_000_000_000)
    with pytest.raises(ModelNotFound, match="no recommended model fits"):
        recommended_fit(settings)
    assert hub.sent == 0


@pytest.mark.usefixtures("settings")
def test_unreachable_hub_raises_offline(tmp_path: Path) -> None:
    with pytest.raises(Offline):
        recommended_fit(settings_in(tmp_path))


def test_recommended_option_refuses_a_model_name() -> None:
    assert CliRunner().invoke(ingle, ["fit", "--recommended", "qwen3:8b"]).exit_code == 2
