"""GPUs that cannot be used: errors, log messages, and the fallback to the CPU."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from engine.backends import device_choice
from engine.backends.cuda import discovery, trial_kernel
from engine.backends.cuda.discovery import Unusable, find_gpu
from engine.backends.cuda.gpu import Gpu
from engine.errors import DeviceLost, NoCompiler, OutOfMemory, UnsupportedModel
from engine.load_options import LoadOptions
from quant.errors import ModelFileError
from quant.kernels.card import Card
from tests.engine.answers import answer
from tests.engine.backends.cuda.two_devices import INTERPRETED, gpu
from tests.engine.models.tiny_llama import make


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Card]]:
    """The GPUs of this machine. Their kernels run in the interpreter."""
    there = [INTERPRETED]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(there))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(there))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    monkeypatch.setattr(discovery, "read_card", there.__getitem__)
    monkeypatch.setattr(discovery, "prepare_compiler", lambda: None)
    monkeypatch.setattr(discovery, "driver_version", lambda: "580.65")
    find_gpu.cache_clear()
    yield there
    find_gpu.cache_clear()


def failing(error: Exception) -> Callable[..., NoReturn]:
    def fail(*arguments: object, **keywords: object) -> NoReturn:
        raise error

    return fail


def test_gpu_without_a_compiler_is_unusable(cards: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "prepare_compiler", failing(NoCompiler("there is no compiler", "Get one.")))
    assert find_gpu() == Unusable("there is no compiler", "Get one.")


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("libcuda.so cannot found!"),
        FileNotFoundError("/sbin/ldconfig"),
        RuntimeError("PTXAS error: Value 'sm_999' is not defined\nRepro command: ptxas"),
        torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
    ],
)
def test_gpu_on_which_no_kernel_runs_is_unusable(
    cards: list[Card], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(trial_kernel, "_trial_kernel", {(1,): failing(error)})
    found = find_gpu()
    assert isinstance(found, Unusable)
    assert found.reason == f"interpreted: a test kernel failed: {str(error).splitlines()[0]}"
    assert "--device cpu" in found.remedy


def test_gpu_that_computes_wrong_numbers_is_unusable(cards: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_kernel, "_trial_kernel", {(1,): lambda *arguments, **keywords: None})
    assert find_gpu() == Unusable("interpreted: a test kernel computed wrong numbers", discovery.REPORT)


def test_gpu_that_runs_a_kernel_is_found(cards: list[Card]) -> None:
    assert find_gpu() == find_gpu(0) == Gpu(INTERPRETED)
    assert find_gpu(1) == Unusable("there is no GPU 1: this machine has GPUs 0 to 0")


def test_failing_cuda_initialization_makes_the_gpu_unusable(cards: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "read_card", failing(RuntimeError("CUDA unknown error - this may be due to")))
    found = find_gpu()
    assert isinstance(found, Unusable)
    assert "CUDA unknown error" in found.reason


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ({"uuid-0": 1 << 30, "uuid-1": 3 << 30, "uuid-2": 2 << 30}, 1),
        ({"uuid-2": 1 << 20}, 2),
        ({}, 2),  # the driver reports none, so the card with the most memory is chosen
    ],
)
def test_gpu_with_the_most_free_memory_is_chosen(
    cards: list[Card], monkeypatch: pytest.MonkeyPatch, free: dict[str, int], expected: int
) -> None:
    cards += [INTERPRETED, replace(INTERPRETED, memory_bytes=2 << 30), replace(INTERPRETED, capability=(7, 5))]
    monkeypatch.setattr(discovery, "free_memories", lambda: free)
    found = find_gpu()
    assert isinstance(found, Gpu)
    assert found.index == expected


def test_gpu_on_which_kernels_fail_is_passed_over(cards: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    cards.append(INTERPRETED)
    monkeypatch.setattr(discovery, "free_memories", dict)
    monkeypatch.setattr(trial_kernel, "why_kernels_fail", lambda gpu: "" if gpu.index else "it is broken")
    assert find_gpu() == Gpu(INTERPRETED, 1)


def test_kernels_start_in_order_if_a_trial_of_early_start_fails(
    cards: list[Card], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cards[0] = hopper = replace(INTERPRETED, capability=(9, 0), interpreted=False)
    monkeypatch.setattr(trial_kernel, "why_kernels_fail", lambda gpu: "")
    monkeypatch.setattr(trial_kernel, "why_early_start_fails", lambda gpu: "")
    assert find_gpu() == Gpu(hopper)
    assert hopper.starts_early
    find_gpu.cache_clear()
    monkeypatch.setattr(trial_kernel, "why_early_start_fails", lambda gpu: "the results are wrong")
    found = find_gpu()
    assert isinstance(found, Gpu)
    assert not found.card.starts_early
    assert "do not start early: the results are wrong" in caplog.text


def test_trial_of_early_start_compares_its_results(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    here = gpu(device)
    assert trial_kernel.why_early_start_fails(here) == ""
    monkeypatch.setattr(trial_kernel, "LAUNCHES", 2)
    chain = trial_kernel._launch_chain
    monkeypatch.setattr(trial_kernel, "_launch_chain", lambda numbers, gpu: chain(numbers.roll(1, 0), gpu))
    assert trial_kernel.why_early_start_fails(here) == "the results are wrong"
    monkeypatch.setattr(trial_kernel, "_launch_chain", failing(RuntimeError("no such attribute\nat line 3")))
    assert trial_kernel.why_early_start_fails(here) == "no such attribute"


@pytest.mark.parametrize(
    ("version", "reason", "remedy"),
    [
        ("550.54.14", "the driver 550.54.14 is too old for CUDA 13.0, which torch is built for", "580 or newer"),
        ("580.65", "the driver 580.65 reports no GPU", "Update"),
        (None, "there is no GPU, or no driver is loaded", "Install"),
    ],
)
def test_missing_gpu_has_a_reason_with_the_driver_that_is_needed(
    cards: list[Card], monkeypatch: pytest.MonkeyPatch, version: str | None, reason: str, remedy: str
) -> None:
    cards.clear()
    monkeypatch.setattr(discovery, "driver_version", lambda: version)
    found = find_gpu()
    assert isinstance(found, Unusable)
    assert found.reason == reason
    assert remedy in found.remedy
    assert found.is_present == (version is not None)


@pytest.mark.share(1)
@pytest.mark.parametrize(
    "error",
    [
        AssertionError("libcuda.so cannot found!"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        DeviceLost("The GPU has stopped working"),
        FileNotFoundError("/sbin/ldconfig"),
    ],
)
def test_model_is_loaded_on_the_cpu_if_the_gpu_fails(
    tmp_path: Path,
    cpu_kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    monkeypatch.setattr(discovery, "find_gpu", lambda index=None: Gpu(INTERPRETED))
    monkeypatch.setattr("engine.backends.cuda.device.CudaDevice.load", failing(error))
    path = make(tmp_path, layers=1, head_dim=32, hidden=128).path
    assert answer(path, LoadOptions(code_cache=cpu_kernels))[0] == "cpu"
    assert "interpreted is not used" in caplog.text
    with pytest.raises((type(error), OutOfMemory)):
        answer(path, LoadOptions(device="cuda"))


def test_damaged_model_is_not_loaded_again_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "find_gpu", lambda index=None: Gpu(INTERPRETED))
    monkeypatch.setattr("engine.backends.cuda.device.CudaDevice.load", failing(ModelFileError("it is damaged")))
    with pytest.raises(ModelFileError, match="it is damaged"):
        answer(make(tmp_path, layers=1).path, LoadOptions())


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
    assert answer(path, LoadOptions())[0] in ("cpu", "reference")
    assert "interpreted is not used" in caplog.text
    assert "its MLP is 90" in caplog.text
    with pytest.raises(UnsupportedModel, match="its MLP is 90"):
        answer(path, LoadOptions(device="cuda"))
    assert device_choice.gpu_for(LoadOptions(device="cuda")) == Gpu(INTERPRETED)
