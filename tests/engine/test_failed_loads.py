"""Loads that fail one after another, each in a random way, leave no memory, threads, or files open.

The full run is `pytest tests/engine/test_failed_loads.py --loads 200`.
"""

import gc
import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.errors import LoadStopped, OutOfMemory
from engine.freed_memory import return_freed_memory
from engine.load_options import LoadControl, LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.system_memory import resident_bytes
from quant.errors import ModelFileError
from tests.engine.answers import answer
from tests.quant.opened_files import open_descriptors
from tests.support.random_gguf import Shape, write

SHAPE = Shape(4, 1024, 16, 4, 64, 2048, 8192)
TENSORS = 3 + 9 * SHAPE.layers
MOST_GROWTH = 64 << 20  # bytes
Fail = Callable[[Path, LoadOptions, random.Random], None]


def cut_file(path: Path, options: LoadOptions, rng: random.Random) -> None:
    """Load a file that ends too early."""
    cut = path.with_name("cut.gguf")
    cut.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    with pytest.raises(ModelFileError), open_checkpoint(cut) as checkpoint:
        load_engine(checkpoint, options)


def missing_shard(path: Path, options: LoadOptions, rng: random.Random) -> None:
    """Load the first of two parts, the second of which does not exist."""
    part = path.with_name("model-00001-of-00002.gguf")
    if not part.exists():
        os.link(path, part)
    with pytest.raises(ModelFileError), open_checkpoint(part) as checkpoint:
        load_engine(checkpoint, options)


def stopped(path: Path, options: LoadOptions, rng: random.Random) -> None:
    """Stop the load after a random tensor."""
    stop, left = threading.Event(), rng.randrange(1, TENSORS)

    def report(bytes_done: int, total: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            stop.set()

    with open_checkpoint(path) as checkpoint, pytest.raises(LoadStopped):
        load_engine(checkpoint, replace(options, control=LoadControl(stop.is_set)), report)


def no_memory(path: Path, options: LoadOptions, rng: random.Random) -> None:
    """Let one of the first allocations fail."""
    left, empty = rng.randrange(1, 6), np.empty

    def failing(*arguments: object, **keywords: object) -> object:
        nonlocal left
        left -= 1
        if not left:
            raise MemoryError
        return empty(*arguments, **keywords)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch, open_checkpoint(path) as checkpoint:
        patch.setattr(np, "empty", failing)
        with pytest.raises(OutOfMemory):
            load_engine(checkpoint, options)


FAILURES: tuple[Fail, ...] = (cut_file, missing_shard, stopped, no_memory)


@pytest.fixture
def loads(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--loads")
    return count


def test_failed_loads_leave_nothing_and_the_next_load_works(
    tmp_path: Path, cpu_kernels: Path, loads: int, seed: int
) -> None:
    path = tmp_path / "model.gguf"
    write(path, "Q8_0", SHAPE)
    options = LoadOptions(backend="cpu", threads=2, context_length=512, code_cache=cpu_kernels)
    expected = answer(path, options)
    rng = random.Random(seed)
    for fail in FAILURES:
        fail(path, options, rng)  # libraries keep some memory at their first use
    gc.collect()
    return_freed_memory()
    before, threads = resident_bytes() or 0, set(threading.enumerate())
    for number in range(loads):
        FAILURES[number % len(FAILURES)](path, options, rng)
        assert set(threading.enumerate()) <= threads
    gc.collect()
    return_freed_memory()
    growth = (resident_bytes() or 0) - before
    print(f"{loads} failed loads, memory {growth / 1e6:+.1f} MB, the file has {path.stat().st_size / 1e6:.0f} MB")
    assert growth < MOST_GROWTH
    assert open_descriptors(tmp_path) == []
    assert answer(path, options) == expected
