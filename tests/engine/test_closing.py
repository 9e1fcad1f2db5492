"""Closed engines and embedders free their memory, threads, and files, without the garbage collector."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import loading
from engine.backends.cpu.device import CpuDevice
from engine.core import Engine
from engine.cpu_threads import ThreadPool
from engine.drafting.draft_model import DraftModel
from engine.embedding.decoder_embedder import load_decoder_embedder
from engine.embedding.encoder import Embedder, Encoder
from engine.embedding.loading import load_encoder
from engine.errors import EngineError, OutOfMemory
from engine.load_options import DiskOptions, LoadOptions
from engine.loading import load_draft_model, load_engine, open_checkpoint
from engine.sampling_params import SamplingParams
from engine.thread import EngineThread
from tests.engine.backends.cuda.two_devices import INTERPRETED
from tests.engine.models import tiny_bert
from tests.engine.models.tiny_llama import MIXES, make
from tests.support.hash_model import hash_engine
from tests.support.processes import until

PROMPT = tuple(range(3, 60))
LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)  # still running when the engine is closed
CYCLES = 30
MAX_GROWTH = 500_000  # bytes of private memory per cycle


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny"), head_dim=32, hidden=128, mlp=128, types=MIXES["Q4_0"]).path


@pytest.fixture
def _uncollected() -> Iterator[None]:
    """Disable the garbage collector, because `gc.freeze` excludes the objects of a program's first model."""
    gc.disable()
    yield
    gc.enable()


def load(path: Path, options: LoadOptions) -> Engine[Any]:
    with open_checkpoint(path) as checkpoint:
        return load_engine(checkpoint, options)


def start(engine: Engine[Any]) -> None:
    """Compute the prompt of a request, and some of its tokens."""
    engine.add(engine.request(PROMPT, LONG, frozenset()))
    for _ in range(4):
        engine.step()


def large_parts(engine: Engine[Any]) -> dict[str, "weakref.ref[Any]"]:
    """Return weak references to the memory of the KV pools and of the weights, and to their owners."""
    model = engine._runner._model  # type: ignore[attr-defined]
    parts = {"cache": model.kv, "pool": model.kv.pools[0], "step": model.compute, "runner": engine._runner}
    if arena := getattr(model.compute, "arena", None):
        parts |= {"arena": arena, "chunk": arena._chunks[0]}
    return {name: weakref.ref(part) for name, part in parts.items()}


def alive(parts: dict[str, "weakref.ref[Any]"]) -> list[str]:
    return [name for name, part in parts.items() if part() is not None]


def files_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def private_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return 1024 * int(next(line for line in status if line.startswith("RssAnon:")).split()[1])


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_closed_engine_frees_its_memory_at_once(tiny: Path, tmp_path: Path, cpu_kernels: Path, backend: str) -> None:
    disk = DiskOptions(tmp_path, 1 << 30)
    engine = load(tiny, LoadOptions(backend, threads=2, code_cache=cpu_kernels, disk=disk, fingerprint="1"))
    start(engine)
    parts = large_parts(engine)
    scheduler = weakref.ref(engine._scheduler)
    engine.close()
    assert alive(parts) == ["runner"]
    del engine
    assert alive(parts) == []
    assert scheduler() is None


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_engine_that_was_not_closed_frees_its_memory_soon(tiny: Path, cpu_kernels: Path, backend: str) -> None:
    engine = load(tiny, LoadOptions(backend, threads=2, code_cache=cpu_kernels))
    start(engine)
    parts = large_parts(engine)
    del engine
    until = time.monotonic() + 10
    while alive(parts) and time.monotonic() < until:
        time.sleep(0.01)  # until the compute threads have ended
    assert alive(parts) == []


@pytest.mark.usefixtures("_uncollected")
def test_closed_gpu_engine_frees_its_memory_at_once(tmp_path: Path, device: object) -> None:
    engine = load(make(tmp_path).path, LoadOptions("cuda", context_length=64, card=INTERPRETED, host_cache=1 << 20))
    start(engine)
    step = engine._runner._step  # type: ignore[attr-defined]
    parts = {"cache": weakref.ref(step.kv), "weights": weakref.ref(step._compute.args[0])}
    parts |= {"pool": weakref.ref(step.kv.pools[0]), "host pool": weakref.ref(step.kv.host_pools[0])}
    del step
    engine.close()
    assert alive(parts) == []
    assert engine.state().failed_captures == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads figures of the process from Linux")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_loading_and_closing_leaves_no_memory_threads_or_files(
    tiny: Path, tmp_path: Path, cpu_kernels: Path, backend: str
) -> None:
    disk = DiskOptions(tmp_path, 1 << 30)
    options = LoadOptions(backend, threads=2, code_cache=cpu_kernels, disk=disk, fingerprint="1")
    gc.collect()  # otherwise threads of earlier tests may end during this test
    sizes, figures = list[int](), list[tuple[int, int]]()
    for _ in range(CYCLES):
        engine = load(tiny, options)
        start(engine)
        engine.close()
        del engine
        sizes.append(private_bytes())
        figures.append(files_and_threads())
    until(lambda: all(now <= then for now, then in zip(files_and_threads(), figures[0], strict=True)))
    half = CYCLES // 2
    assert (sizes[-1] - sizes[half]) / (CYCLES - half) < MAX_GROWTH


def test_closed_engine_refuses_work_and_keeps_its_counters() -> None:
    engine, _ = hash_engine()
    start(engine)
    request = engine.request((1, 2, 3), LONG, frozenset())
    computed = engine.state().counters.computed_tokens
    engine.close()
    engine.close()
    for work in (lambda: engine.add(request), engine.step, lambda: engine.forget(PROMPT)):
        with pytest.raises(EngineError, match="closed"):
            work()
    assert engine.abort(request.id) == []
    assert engine.abort_all() == []
    engine.flush()
    engine.assert_empty()
    assert engine.state().counters.computed_tokens == computed > 0


def test_closing_writes_blocks_to_files(tiny: Path, tmp_path: Path) -> None:
    options = LoadOptions("reference", disk=DiskOptions(tmp_path, 1 << 30), fingerprint="1")
    engine = load(tiny, options)
    start(engine)
    engine.close()
    engine = load(tiny, options)
    start(engine)
    assert engine.state().counters.prompts.disk == 48
    engine.close()


def test_stopped_thread_closes_its_engine() -> None:
    for is_started in (True, False):
        engine, _ = hash_engine()
        thread = EngineThread(engine, lambda events: None)
        if is_started:
            thread.start()
        thread.stop()
        thread.stop()
        with pytest.raises(EngineError, match="closed"):
            engine.step()


def test_failed_engine_is_closed_when_its_thread_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = hash_engine()

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine._scheduler, "schedule", fail)
    monkeypatch.setattr(engine._scheduler, "abort_all", fail)
    ended = threading.Event()
    thread = EngineThread(engine, lambda events: ended.set())
    thread.start()
    thread.submit(PROMPT, [LONG], frozenset(), before=lambda request: None)
    assert ended.wait(60)
    thread.stop()
    with pytest.raises(EngineError, match="closed"):
        engine.step()


@pytest.mark.usefixtures("_uncollected")
def test_closed_engine_frees_its_draft_model(tiny: Path, cpu_kernels: Path) -> None:
    threads = threading.active_count()
    options = LoadOptions("cpu", threads=2, code_cache=cpu_kernels)
    engine = load(tiny, options)
    with open_checkpoint(tiny) as checkpoint:
        draft_model = load_draft_model(checkpoint, options, engine)
    arena = weakref.ref(draft_model._runner._model.compute.arena)  # type: ignore[attr-defined]
    engine.draft_with(draft_model)
    del draft_model
    start(engine)
    engine.close()
    assert arena() is None
    assert threading.active_count() == threads


def bert(folder: Path) -> Path:
    return tiny_bert.make(folder, types=tiny_bert.MIXES["Q8_0"]).path


def decoder(folder: Path) -> Path:
    return make(folder, head_dim=32, hidden=64).path


def memory_of(embedder: Embedder) -> "weakref.ref[Any]":
    if isinstance(embedder, Encoder):
        return weakref.ref(embedder._model)
    return weakref.ref(embedder._engine._runner._runner._model.kv)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("write", "load"), [(bert, load_encoder), (decoder, load_decoder_embedder)])
def test_closed_embedder_frees_its_memory_and_threads(
    tmp_path: Path, cpu_kernels: Path, backend: str, write: Callable[[Path], Path], load: Callable[..., Embedder]
) -> None:
    path = write(tmp_path)
    threads = threading.active_count()
    with open_checkpoint(path) as checkpoint:
        embedder = load(checkpoint, LoadOptions(backend, threads=2, code_cache=cpu_kernels))
    assert len(embedder.encode([PROMPT[:20]] * 4)) == 4
    memory = memory_of(embedder)
    assert threading.active_count() > threads
    embedder.close()
    embedder.close()
    assert memory() is None
    assert threading.active_count() == threads


LAST_STAGES: list[tuple[Any, str]] = [
    (loading, "DiskStore"),
    (loading, "ThreadedTransfer"),
    (CpuDevice, "runner"),
    (loading, "Engine"),
    (Engine, "adopt"),
]


def fail(*args: object, **options: object) -> None:
    raise MemoryError


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize(("owner", "name"), LAST_STAGES, ids=[name for _, name in LAST_STAGES])
def test_load_that_fails_after_its_weights_leaves_no_threads(
    tiny: Path, tmp_path: Path, cpu_kernels: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """The load takes a parked cache. The pool of compute threads stays."""
    disk, pool = DiskOptions(tmp_path, 1 << 30), ThreadPool()
    options = LoadOptions("cpu", threads=2, code_cache=cpu_kernels, disk=disk, fingerprint="1", cpu_threads=pool)
    engine = load(tiny, options)
    start(engine)
    parked, threads = engine.park(), set(threading.enumerate())
    assert parked is not None
    with monkeypatch.context() as patch, open_checkpoint(tiny) as checkpoint:
        patch.setattr(owner, name, fail)
        with pytest.raises(OutOfMemory):
            load_engine(checkpoint, options, parked=parked)
    until(lambda: set(threading.enumerate()) == threads)
    assert pool.num_threads == 1


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("owner", [CpuDevice, DraftModel])
def test_draft_model_that_fails_to_load_leaves_no_threads(
    tiny: Path, cpu_kernels: Path, monkeypatch: pytest.MonkeyPatch, owner: Any
) -> None:
    options = LoadOptions("cpu", threads=2, code_cache=cpu_kernels)
    engine, threads = load(tiny, options), set(threading.enumerate())
    monkeypatch.setattr(owner, "runner" if owner is CpuDevice else "measure", fail)
    with open_checkpoint(tiny) as checkpoint, pytest.raises(OutOfMemory):
        load_draft_model(checkpoint, options, engine)
    assert set(threading.enumerate()) == threads
    engine.close()


def test_decoder_embedder_whose_thread_cannot_start_closes_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, closed = decoder(tmp_path), list[Engine[Any]]()
    monkeypatch.setattr(EngineThread, "start", fail)
    close = Engine.close

    def closing(engine: Engine[Any]) -> None:
        closed.append(engine)
        close(engine)

    monkeypatch.setattr(Engine, "close", closing)
    with open_checkpoint(path) as checkpoint, pytest.raises(MemoryError):
        load_decoder_embedder(checkpoint, LoadOptions("reference"))
    assert [engine._is_closed for engine in closed] == [True]


@pytest.mark.usefixtures("_uncollected")
def test_engine_whose_scheduler_cannot_be_closed_ends_its_threads(
    tiny: Path, cpu_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set(threading.enumerate())
    engine = load(tiny, LoadOptions("cpu", threads=2, code_cache=cpu_kernels))
    monkeypatch.setattr(engine._scheduler, "close", fail)
    with pytest.raises(MemoryError):
        engine.close()
    assert set(threading.enumerate()) == threads
