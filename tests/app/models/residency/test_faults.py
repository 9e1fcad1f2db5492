"""Faults at each stage of a load: failed allocations, files that cannot be read, and starts that fail.

Each test loads a tiny model with the loader of a server. After a fault, the requests that wait get one error, nothing
of the load stays, the other model can be used, and the next request for the model succeeds.
"""

import asyncio
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from app.errors import ModelNotFound
from app.generation.template import ChatTemplateRenderer
from app.models.load import loaded_encoder, loaded_model, model_loader
from app.models.load.model_loader import ModelLoader
from app.models.residency.load_failures import FAILED_SECONDS, FULL_SECONDS
from app.models.residency.residents import Residents
from engine import loading
from engine.backends import reference
from engine.backends.reference import ReferenceDevice
from engine.checkpoints.weights import Weights
from engine.embedding import loading as embedder_loading
from engine.errors import EngineError, OutOfMemory
from engine.kv.disk import folder as disk_folder
from engine.kv.disk import store as disk_store
from engine.thread import EngineThread
from quant import checkpoint_files
from quant.errors import InglenookError, ModelFileError
from quant.tensor_file import TensorFiles
from tests.app.models import tiny_chat
from tests.app.models.load.test_loaded_encoder import embedding_model
from tests.app.models.residency.fault_machine import Machine, MakeError, Stage, machine_with, run_and_check

STAGES: dict[str, Stage] = {
    "find": (ModelLoader, "stored"),
    "plan": (model_loader, "memory_plans"),
    "kind": (model_loader, "is_embedding_model"),
    "open": (loaded_model, "open_checkpoint"),
    "config": (loaded_model, "read_config"),
    "needs": (loaded_model, "plan_loading"),
    "vocabulary": (loaded_model, "tokenizer_of"),
    "sampling": (loaded_model, "read_sampling"),
    "digest": (loaded_model, "digest_of"),
    "weights": (Weights, "take"),
    "tensor data": (TensorFiles, "data"),
    "template process": (ChatTemplateRenderer, "start"),
    "kernels": (loaded_model, "prepare_kernels"),
    "options": (loading, "_resolve"),
    "caches": (reference, "KVCache"),
    "disk tier": (loading, "DiskStore"),
    "transfers": (loading, "ThreadedTransfer"),
    "runner": (ReferenceDevice, "runner"),
    "engine": (loading, "Engine"),
    "use record": (loaded_model, "record_use"),
    "service": (model_loader, "ChatService"),
    "loaded model": (model_loader, "LoadedChat"),
}
READING = list(STAGES)[:11]  # stages that read files
ENCODER_STAGES: dict[str, Stage] = {
    "vocabulary": (loaded_encoder, "_tokenizer"),
    "encoder": (embedder_loading, "Encoder"),
    "use record": (loaded_encoder, "record_use"),
    "service": (model_loader, "EmbeddingService"),
    "loaded model": (model_loader, "LoadedEmbedder"),
    "register": (Residents, "adopt"),
}
ENDING: dict[str, Stage] = {"start": (EngineThread, "start"), "register": (Residents, "adopt")}

TORCH = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"
ALLOCATIONS: dict[str, MakeError] = {
    "python": MemoryError,
    "torch": lambda: RuntimeError(TORCH),
    "gpu": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "engine": lambda: OutOfMemory("There is not enough memory"),
    "system": lambda: os_error(errno.ENOMEM),
}
FILES = {"EIO": errno.EIO, "ENOENT": errno.ENOENT, "EACCES": errno.EACCES, "EMFILE": errno.EMFILE}


def os_error(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    tiny_chat.save(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_model(tmp_path_factory.mktemp("encoder")).folder


@pytest.fixture
def machine(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with machine_with(saved, tmp_path, monkeypatch) as machine:
        yield machine


async def check_failure(
    machine: Machine, kind: type[InglenookError], seconds: float, text: str = "", *, attempts: int = 1
) -> None:
    """Assert that two requests fail with the same error, that another model works, and later requests as well."""
    residents = machine.residents
    errors = await asyncio.gather(machine.use("a"), machine.use("a"), return_exceptions=True)
    assert [type(error) for error in errors] == [kind] * 2, errors
    assert text in str(errors[0])
    assert errors[0] is errors[1]
    assert (machine.loader.attempts, residents.of("a").failed_loads) == (attempts, 1)
    machine.check_nothing_is_left()
    await machine.use("b")
    with pytest.raises(kind):
        await machine.use("a")
    machine.clock.seconds += seconds + 1
    await machine.use("a")
    assert [entry.name for entry in residents.memory.ledger({}).entries] == ["a", "b"]


@pytest.mark.parametrize("fault", ALLOCATIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_failed_allocation_is_retried_once(machine: Machine, stage: str, fault: str) -> None:
    machine.fail(STAGES[stage], ALLOCATIONS[fault])

    async def work() -> None:
        await asyncio.gather(machine.use("a"), machine.use("a"))
        model = machine.residents.of("a")
        assert (machine.loader.attempts, model.loads, model.failed_loads) == (2, 1, 0)

    run_and_check(machine, work)


@pytest.mark.parametrize("stage", STAGES)
def test_second_failed_allocation_is_the_error_of_all_requests(machine: Machine, stage: str) -> None:
    machine.fail(STAGES[stage], ALLOCATIONS["torch"], attempts=2)
    run_and_check(machine, lambda: check_failure(machine, OutOfMemory, FULL_SECONDS, attempts=2))


def test_error_of_a_failed_allocation_has_the_numbers(machine: Machine) -> None:
    machine.fail(STAGES["caches"], MemoryError, attempts=2)
    text = r"ran out of memory, although it needs .+ of .+ \(host\): There is not enough memory: MemoryError"

    async def work() -> None:
        with pytest.raises(OutOfMemory, match=text) as failed:
            await machine.use("a")
        assert "Close other programs" in failed.value.remedy

    run_and_check(machine, work)


@pytest.mark.parametrize("stage", ENDING)
@pytest.mark.parametrize("attempts", [1, 2])
def test_failed_allocation_at_the_end_of_a_load_is_retried_once(machine: Machine, stage: str, attempts: int) -> None:
    machine.fail(ENDING[stage], MemoryError, attempts)

    async def work() -> None:
        if attempts == 1:
            await machine.use("a")
        else:
            await check_failure(machine, OutOfMemory, FULL_SECONDS, "not enough memory", attempts=2)

    run_and_check(machine, work)


@pytest.mark.parametrize("stage", ENDING)
def test_failure_at_the_end_of_a_load_is_the_error_of_all_requests(machine: Machine, stage: str) -> None:
    machine.fail(ENDING[stage], lambda: RuntimeError("can't start new thread"))
    run_and_check(machine, lambda: check_failure(machine, EngineError, FAILED_SECONDS, "could not be loaded"))


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("stage", ENCODER_STAGES)
def test_failed_allocation_for_an_embedding_model_is_retried_once(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, attempts: int
) -> None:
    with machine_with(encoder, tmp_path, monkeypatch) as machine:
        machine.fail(ENCODER_STAGES[stage], MemoryError, attempts)

        async def work() -> None:
            if attempts == 1:
                await machine.use("a")
            else:
                await check_failure(machine, OutOfMemory, FULL_SECONDS, attempts=2)

        run_and_check(machine, work)


@pytest.mark.parametrize("fault", FILES)
@pytest.mark.parametrize("stage", READING)
def test_file_that_cannot_be_read_is_the_error_of_all_requests(machine: Machine, stage: str, fault: str) -> None:
    machine.fail(STAGES[stage], lambda: os_error(FILES[fault], str(machine.files / "model.safetensors")))
    text = f"Cannot read {machine.files / 'model.safetensors'}: {os.strerror(FILES[fault])}"
    run_and_check(machine, lambda: check_failure(machine, ModelFileError, FAILED_SECONDS, text))


def test_read_error_without_a_name_names_the_model(machine: Machine) -> None:
    machine.fail(STAGES["digest"], lambda: os_error(errno.EIO))
    text = f"Cannot read the files of a: {os.strerror(errno.EIO)}"
    run_and_check(machine, lambda: check_failure(machine, ModelFileError, FAILED_SECONDS, text))


@pytest.mark.parametrize("stage", [(checkpoint_files, "open"), (os, "preadv"), (os, "fstat")], ids=str)
def test_failed_system_call_names_its_file(machine: Machine, stage: Stage) -> None:
    """Errors of calls with a descriptor have no file name."""
    if stage[0] is checkpoint_files:
        stage[0].open = open  # type: ignore[attr-defined]
    machine.fail(stage, lambda: os_error(errno.EIO))
    run_and_check(
        machine, lambda: check_failure(machine, ModelFileError, FAILED_SECONDS, f"Cannot read {machine.files}")
    )


def test_file_that_is_removed_between_plan_and_load_is_the_error(machine: Machine) -> None:
    weights = machine.files / "model.safetensors"
    content = weights.read_bytes()

    def remove() -> Exception:
        weights.unlink()
        machine.loader.attempts = 2  # this stage does not fail again
        return MemoryError()  # loads the model again, without the file

    machine.fail(STAGES["kind"], remove)

    async def work() -> None:
        with pytest.raises(ModelFileError, match=r"has neither model\.safetensors nor"):
            await machine.use("a")
        machine.check_nothing_is_left()
        weights.write_bytes(content)
        machine.clock.seconds += FAILED_SECONDS + 1
        await machine.use("a")

    run_and_check(machine, work)


def test_file_that_is_truncated_while_it_is_read_is_the_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process and its other model stay, and the model is loaded again when the file is whole."""
    weights, read = machine.files / "model.safetensors", os.preadv
    content = weights.read_bytes()

    def read_after_truncation(descriptor: int, buffers: Sequence[memoryview], position: int) -> int:
        if position > len(content) // 2:
            os.truncate(weights, len(content) // 2)
        return read(descriptor, buffers, position)

    async def work() -> None:
        await machine.use("b")
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", read_after_truncation)
            with pytest.raises(ModelFileError, match=r"was truncated to .* bytes while it was read"):
                await machine.use("a")
        await machine.use("b")
        weights.write_bytes(content)
        machine.clock.seconds += FAILED_SECONDS + 1
        await machine.use("a")

    run_and_check(machine, work)


def test_model_whose_folder_is_removed_is_not_found(machine: Machine) -> None:
    async def work() -> None:
        await machine.use("a")
        machine.files.rename(machine.folder / "elsewhere")
        await machine.use("a")  # it is loaded
        await machine.residents.unload("a")
        with pytest.raises(ModelNotFound, match="The files of model were removed"):
            await machine.use("a")

    run_and_check(machine, work)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_model_loads_without_a_disk_cache_that_cannot_be_opened(
    machine: Machine, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (disk_folder, disk_store):
        machine.fail((module, "private_folder"), lambda: os_error(number, str(machine.folder / "kv")), attempts=9)

    async def work() -> None:
        await machine.use("a")
        assert (machine.loader.attempts, machine.residents.of("a").failed_loads) == (1, 0)

    run_and_check(machine, work)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"writing the KV cache to {machine.folder / 'kv'}")
    assert os.strerror(number) in line
