"""Errors of torch, CUDA, and Triton become the engine's errors. A lost GPU ends the engine."""

import threading
from typing import NoReturn

import pytest
import torch

from engine.backends.device_errors import raising_device_lost, raising_out_of_memory
from engine.errors import DeviceLost, EngineError, OutOfMemory
from tests.engine.test_thread import Client
from tests.support.hash_model import HashTicket, hash_engine
from tests.support.processes import HANGING_SECONDS, until

ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later."


def fail() -> NoReturn:
    raise torch.AcceleratorError(ILLEGAL_ACCESS)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] can't allocate memory: you tried to allocate 8 bytes."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.AcceleratorError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_exhausted_memory_is_recoverable(error: Exception) -> None:
    with pytest.raises(OutOfMemory), raising_out_of_memory(), raising_device_lost(fail):
        raise error


def test_error_of_a_device_that_still_works_is_unchanged() -> None:
    with pytest.raises(RuntimeError, match="invalid argument"), raising_device_lost(lambda: None):
        raise RuntimeError("CUDA error: invalid argument")


def test_error_repeated_by_every_later_call_raises_device_lost() -> None:
    with pytest.raises(DeviceLost) as lost, raising_out_of_memory(), raising_device_lost(fail):
        fail()
    assert lost.value.message == ("The GPU has stopped working: CUDA error: an illegal memory access was encountered")
    assert "Xid" in lost.value.remedy


@pytest.mark.parametrize("call", ["launch", "collect", "recover"])
def test_lost_device_ends_the_engine_with_the_reason(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = hash_engine(depth=2)
    submitted = threading.Event()  # a lost engine would refuse the later requests

    def lost(*arguments: object) -> NoReturn:
        assert submitted.wait(HANGING_SECONDS)
        raise DeviceLost("The GPU has stopped working: it is on fire")

    def exhausted(ticket: HashTicket) -> NoReturn:
        raise OutOfMemory("there is none")

    monkeypatch.setattr(runner, call, lost)
    if call == "recover":
        monkeypatch.setattr(runner, "collect", exhausted)
    client = Client(engine)
    requests = [client.submit((1, 2, number), 900) for number in range(3)]
    submitted.set()
    ends = client.endings(requests)
    until(lambda: client.thread.failure != "")
    assert {event.error for event in ends.values()} == {"The GPU has stopped working: it is on fire"}
    assert client.thread.problem() == client.thread.failure == "The GPU has stopped working: it is on fire"
    with pytest.raises(EngineError, match="on fire"):
        client.submit()
    client.thread.stop()
