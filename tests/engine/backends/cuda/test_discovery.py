"""GPUs that cannot be used: errors, log messages, and the fallback to the CPU."""

from pathlib import Path

import pytest
import torch

from engine.backends import device_choice
from engine.backends.cuda import discovery
from engine.backends.cuda.discovery import Unusable, find_gpu
from engine.backends.cuda.gpu import Gpu
from engine.errors import NoCompiler, UnsupportedModel
from engine.load_options import LoadOptions
from tests.engine.answers import answer
from tests.engine.backends.cuda.two_devices import INTERPRETED
from tests.engine.models.tiny_llama import make


def test_gpu_without_a_compiler_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NoCompiler("there is no compiler", "Get one.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(discovery, "prepare_compiler", none)
    find_gpu.cache_clear()
    found = find_gpu()
    find_gpu.cache_clear()
    assert found == Unusable("there is no compiler", "Get one.")


@pytest.fixture
def no_usable_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Make every GPU unusable. Returns the list of indices that were requested."""
    requested: list[int | None] = []

    def find(index: int | None = None) -> Unusable:
        requested.append(index)
        return Unusable("its fan is too loud", "Turn it off.")

    monkeypatch.setattr(discovery, "find_gpu", find)
    return requested


def test_requiring_an_unusable_gpu_raises_the_reason(no_usable_gpu: list[int | None], tmp_path: Path) -> None:
    path = make(tmp_path, layers=1).path
    for options in (LoadOptions(device="cuda"), LoadOptions(device="cuda:3"), LoadOptions(backend="cuda")):
        with pytest.raises(UnsupportedModel, match="its fan is too loud") as refusal:
            answer(path, options)
        assert refusal.value.remedy == "Turn it off."
    assert no_usable_gpu == [None, 3, None]


def test_unusable_gpu_is_logged_and_not_used(
    no_usable_gpu: list[int | None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(tmp_path, layers=1).path
    assert answer(path, LoadOptions())[0] != "cuda"
    assert "its fan is too loud" in caplog.text
    caplog.clear()
    assert answer(path, LoadOptions(device="cpu"))[0] == answer(path, LoadOptions(backend="reference"))[0]
    assert not caplog.text.count("fan")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (LoadOptions(device="abacus"), "'abacus'"),
        (LoadOptions(device="cpu", backend="cuda"), "cuda kernels do not run on the device cpu"),
        (LoadOptions(device="cuda:0", backend="reference"), "reference kernels do not run on the device cuda:0"),
        (LoadOptions(card=INTERPRETED, kv_type="int8"), "int8"),
    ],
)
def test_conflicting_options_are_refused(tmp_path: Path, options: LoadOptions, problem: str) -> None:
    with pytest.raises(UnsupportedModel, match=problem):
        answer(make(tmp_path, layers=1).path, options)


def test_model_without_gpu_kernels_runs_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "find_gpu", lambda index=None: Gpu(INTERPRETED))
    path = make(tmp_path, layers=1, mlp=90).path
    assert answer(path, LoadOptions())[0] != "cuda"
    assert "interpreted is not used" in caplog.text
    assert "its MLP is 90" in caplog.text
    with pytest.raises(UnsupportedModel, match="its MLP is 90"):
        answer(path, LoadOptions(device="cuda"))
    assert device_choice.gpu_for(LoadOptions(device="cuda")) == Gpu(INTERPRETED)
