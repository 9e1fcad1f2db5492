"""`ingle quantize`: its output, and the sources and options that it refuses."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from filelock import FileLock, Timeout
from safetensors.torch import save_file

from app.cli import ingle
from app.commands.quantize import METHODS
from app.errors import EXIT_NOT_FOUND, ModelNotFound, NoSpace, exit_status
from app.models import quantized_copy
from engine.checkpoints import quantizing
from quant import quantized_storage


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    weights = {"model.layers.0.mlp.up_proj.weight": torch.randn(512, 256), "lm_head.weight": torch.randn(8, 256)}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Restore torch's threads, because the command sets one thread."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _quantize(*arguments: object) -> Result:
    return CliRunner().invoke(ingle, ["quantize", *map(str, arguments)])


def test_path_is_printed_to_stdout(source: Path, tmp_path: Path) -> None:
    answer = _quantize(source, tmp_path / "copy", "--to", "fp8")
    assert (answer.exit_code, answer.stdout) == (0, f"{tmp_path / 'copy'}\n")
    assert "Quantized 1 layer to fp8: from 532.5 kB to" in answer.stderr
    assert (tmp_path / "copy" / "model.safetensors").exists()


def test_json_option_prints_one_object(source: Path, tmp_path: Path) -> None:
    answer = _quantize(source, tmp_path / "copy", "--to", "int4", "--group-size", 32, "--json", "-q")
    assert answer.stderr == ""
    report = json.loads(answer.stdout)
    assert report.keys() == {"path", "method", "group_size", "layers", "original_bytes", "size"}
    assert (report["method"], report["group_size"], report["layers"]) == ("int4", 32, 1)


def test_double_quant_makes_nf4_smaller(source: Path, tmp_path: Path) -> None:
    _quantize(source, tmp_path / "copy", "--to", "nf4")
    _quantize(source, tmp_path / "small", "--to", "nf4", "--double-quant")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("copy", "small")]
    assert sizes[0] - sizes[1] > 512 * 256 // 64 * 2


def test_target_folder_is_locked(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def writing(*arguments: object) -> None:
        [lock] = (tmp_path / "models" / ".locks").iterdir()
        with pytest.raises(Timeout):
            FileLock(lock).acquire(timeout=0)
        raise NoSpace("it was held")

    monkeypatch.setenv("INGLE_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setattr(quantized_copy, "_write_tensors", writing)
    (tmp_path / "here").symlink_to(tmp_path)
    for target in (tmp_path / "copy", tmp_path / "here" / "copy"):
        answer = _quantize(source, target, "--to", "fp8")
        assert str(answer.exception) == "it was held"


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--to", "int3"),
        ("--to", "fp8", "--group-size", "64"),
        ("--to", "int4", "--double-quant"),
        ("--to", "nf4", "--no-calibration"),
        ("--to", "int4", "--group-size", "48"),
    ],
)
def test_incompatible_options_are_a_usage_error(source: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    answer = _quantize(source, tmp_path / "copy", *options)
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert not (tmp_path / "copy").exists()


def test_missing_source_is_not_found(tmp_path: Path) -> None:
    answer = _quantize(tmp_path / "absent", tmp_path / "copy", "--to", "nf4")
    assert isinstance(answer.exception, ModelNotFound)
    assert exit_status(answer.exception) == EXIT_NOT_FOUND


def test_quantize_and_load_offer_the_same_methods() -> None:
    assert list(METHODS) == list(quantized_storage.METHODS) == list(quantizing.METHODS)
