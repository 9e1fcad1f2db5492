"""Loads that the caller stops, and loads beside an engine that computes."""

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine import models
from engine.checkpoints.weights import Weights
from engine.errors import LoadStopped
from engine.freed_memory import return_freed_memory
from engine.load_options import LoadControl, LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.system_memory import resident_bytes
from tests.engine.answers import answer
from tests.support.random_gguf import Shape, write

SHAPE = Shape(6, 1024, 16, 4, 64, 2048, 8192)
TENSORS = 3 + 9 * SHAPE.layers
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write(path, "Q8_0", SHAPE)
    return path


def options_of(cpu_kernels: Path, control: LoadControl) -> LoadOptions:
    return LoadOptions(backend="cpu", threads=4, context_length=512, code_cache=cpu_kernels, control=control)


def stopped_at(path: Path, options: LoadOptions, tensor: int) -> tuple[LoadStopped, int]:
    """Stop a load after a number of tensors. Returns the error, and the number of tensors that were loaded."""
    stop, done = threading.Event(), list[int]()

    def report(bytes_done: int, total: int) -> None:
        done.append(bytes_done)
        if len(done) == tensor:
            stop.set()

    with open_checkpoint(path) as checkpoint, pytest.raises(LoadStopped) as stopped:
        load_engine(checkpoint, replace(options, control=LoadControl(stop.is_set)), report)
    return stopped.value, len(done)


@pytest.mark.parametrize("tensor", [1, TENSORS // 2, TENSORS])
def test_stopped_load_frees_memory_and_threads(model: Path, cpu_kernels: Path, tensor: int) -> None:
    """The errors are still referenced while the memory is measured. Libraries keep some at their first use."""
    options = options_of(cpu_kernels, LoadControl())
    expected = answer(model, options)
    return_freed_memory()
    threads, errors, growth = set(threading.enumerate()), list[LoadStopped](), list[int]()
    gc.disable()
    try:
        for _ in range(4):
            before = resident_bytes() or 0
            error, done = stopped_at(model, options, tensor)
            errors.append(error)
            growth.append((resident_bytes() or 0) - before)
            assert set(threading.enumerate()) <= threads
            assert tensor <= done < tensor + 4
    finally:
        gc.enable()
    assert min(growth) < 2 * MIB
    assert errors[0].message == "The load was stopped"
    assert answer(model, options) == expected


def inside_at_once(path: Path, is_busy: Callable[[list[int]], bool]) -> list[int]:
    """Load six layers with three threads. Returns how many of them had a tensor at the same time, for each tensor.

    The other engine is busy while `is_busy` is true of the numbers so far.
    """
    inside, found, lock = 0, list[int](), threading.Lock()
    control = LoadControl(is_busy=lambda: is_busy(found))

    def load(item: int) -> int:
        nonlocal inside
        for name in ("attn_norm", "ffn_norm"):
            weights.take_vector(f"blk.{item}.{name}.weight", SHAPE.hidden)
            with lock:
                inside += 1
                found.append(inside)
            time.sleep(0.02)
            with lock:
                inside -= 1
        return item

    with open_checkpoint(path) as checkpoint:
        weights = Weights(checkpoint.path, models.stored_weights(checkpoint), threads=3, control=control)
        assert weights.load_parallel(load, range(SHAPE.layers)) == list(range(SHAPE.layers))
    return found


def test_busy_engine_leaves_one_loading_thread(model: Path) -> None:
    assert max(inside_at_once(model, lambda _: True)) == 1
    assert max(inside_at_once(model, lambda _: False)) == 3


def test_all_threads_go_on_when_the_other_engine_is_idle(model: Path) -> None:
    found = inside_at_once(model, lambda found: len(found) < 2)
    assert found[:2] == [1, 1]
    assert max(found) == 3


def test_waiting_threads_end_when_the_load_is_stopped(model: Path) -> None:
    stop = threading.Event()

    def load(item: int) -> None:
        weights.take_vector(f"blk.{item}.attn_norm.weight", SHAPE.hidden)
        stop.set()
        time.sleep(0.1)
        weights.take_vector(f"blk.{item}.ffn_norm.weight", SHAPE.hidden)

    with open_checkpoint(model) as checkpoint:
        control = LoadControl(stop.is_set, lambda: True)
        weights = Weights(checkpoint.path, models.stored_weights(checkpoint), threads=3, control=control)
        with pytest.raises(LoadStopped):
            weights.load_parallel(load, range(3))
