"""The thread pool: results do not depend on the number of threads, and no thread is left waiting or running."""

import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.device import CpuStep
from engine.batch import Batch
from engine.config import EngineConfig
from engine.cpu_threads import ThreadPool
from tests.engine.backends.cpu.recorded import advance, compute, load_step, sequence
from tests.engine.models.tiny_llama import MIXES, make

SEED = 17
VOCABULARY = 97
CONFIG = EngineConfig("cpu", context_length=512, num_blocks=120, max_step_tokens=128, max_running=4, threads=5)
TIMEOUT = 300.0  # seconds after which a test counts as hanging
ASLEEP = 0.3  # seconds until an idle worker certainly sleeps

MakeStep = Callable[[int], CpuStep]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make(folder, heads=3, kv_heads=1, head_dim=32, hidden=96, types=MIXES["Q4_1"]).path


@pytest.fixture
def others(cpu_kernels: Path) -> set[threading.Thread]:
    """Threads that already ran before the test."""
    gc.collect()
    return set(threading.enumerate())


@pytest.fixture
def make_step(path: Path, cpu_kernels: Path) -> MakeStep:
    def made(threads: int) -> CpuStep:
        return load_step(path, cpu_kernels, replace(CONFIG, threads=threads))

    return made


def batches(sizes: Sequence[int]) -> Iterator[Batch]:
    """Yield batches of one request's tokens in steps of these sizes."""
    length = sum(sizes)
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(SEED)).tolist()
    it = sequence(1, ids, range(1, 2 + length // 16))
    for size in sizes:
        yield advance([(it, size)], vocab_size=VOCABULARY, num_blocks=CONFIG.num_blocks)


def computed(step: CpuStep, sizes: Sequence[int], threads: Callable[[], int | None]) -> Tensor:
    """Return the logits of all tokens."""
    return torch.cat([compute(step, batch, threads()) for batch in batches(sizes)])


def use(step: CpuStep, threads: int) -> None:
    computed(step, [15, 1, 5], lambda: threads)


def within_timeout(work: Callable[[], None]) -> None:
    """Run `work` in a thread, so that a deadlock fails the test instead of blocking the run."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 # raised below
            failures.append(error)

    worker = threading.Thread(target=guarded, daemon=True)
    worker.start()
    worker.join(TIMEOUT)
    assert not worker.is_alive(), f"not done after {TIMEOUT:.0f} seconds"
    if failures:
        raise failures[0]


def ended(threads: set[threading.Thread]) -> bool:
    """Whether these threads end."""
    deadline = time.monotonic() + TIMEOUT
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(thread.is_alive() for thread in threads)


def test_bits_do_not_depend_on_the_number_of_threads(make_step: MakeStep) -> None:
    """The run prefills chunks, then decodes single tokens, with a different number of threads in each step."""
    results: list[Tensor] = []

    def work() -> None:
        rng = random.Random(SEED)
        for pool_size, used in ((1, [1]), (2, [2]), (3, [3]), (5, [5]), (5, [1, 2, 3, 4, 5])):
            sizes = [100, 1, 1, 1, 37, 2, 3, *[1] * 30]
            results.append(computed(make_step(pool_size), sizes, lambda used=used: rng.choice(used)))  # type: ignore[misc]

    within_timeout(work)
    assert len(results) == 5
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("threads", [2, 4])
def test_no_wake_up_is_lost_around_the_idle_timeout(make_step: MakeStep, threads: int) -> None:
    """The pauses between steps are close to the idle timeout, so that steps start while a worker is about to sleep."""
    step, rng = make_step(threads), random.Random(SEED)

    def work() -> None:
        for batch in batches([1] * 250):
            step.fill(batch)
            step.workers.run(1, rng.choice([threads, threads, 1, 2]))
            time.sleep(rng.choice([0, 0, 1e-4, 5e-4, 1e-3, 2e-3, 4e-3]) * rng.random())

    within_timeout(work)


def test_automatic_thread_count_gives_the_same_bits(make_step: MakeStep) -> None:
    results: list[Tensor] = []
    within_timeout(
        lambda: results.extend(computed(make_step(pool_size), [1] * 150, lambda: None) for pool_size in (3, 1))
    )
    assert torch.equal(*results)


def test_two_pools_run_concurrently(make_step: MakeStep) -> None:
    """Each model is used by its own thread, and the two share no state."""
    made = [make_step(3) for _ in range(2)]
    results: dict[int, Tensor] = {}

    def drive(number: int) -> None:
        results[number] = computed(made[number], [50, *[1] * 60], lambda: 3)

    def work() -> None:
        drivers = [threading.Thread(target=drive, args=(number,), daemon=True) for number in range(2)]
        for driver in drivers:
            driver.start()
        for driver in drivers:
            driver.join()

    within_timeout(work)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("pause", [0.0, ASLEEP], ids=["awake", "asleep"])
@pytest.mark.parametrize("used", [True, False], ids=["used", "never used"])
def test_close_ends_the_worker_threads(
    make_step: MakeStep, others: set[threading.Thread], pause: float, used: bool
) -> None:
    step = make_step(4)
    workers = set(threading.enumerate()) - others
    assert len(workers) == 3
    if used:
        within_timeout(lambda: use(step, 4))
    time.sleep(pause)
    step.workers.close()
    assert ended(workers)
    step.workers.close()  # closing again has no effect


def test_collected_pool_ends_its_threads(make_step: MakeStep, others: set[threading.Thread]) -> None:
    """The memory of the step is freed as well."""
    step = make_step(4)
    workers, gone = set(threading.enumerate()) - others, weakref.ref(step.arena)
    within_timeout(partial(use, step, 4))
    assert len(workers) == 3
    del step
    gc.collect()
    assert gone() is None
    assert ended(workers)


def test_pool_of_one_has_no_worker_threads(make_step: MakeStep, others: set[threading.Thread]) -> None:
    step = make_step(1)
    assert set(threading.enumerate()) <= others
    step.workers.close()


@pytest.mark.parametrize("threads", [0, 3])
def test_invalid_thread_count_is_rejected(make_step: MakeStep, threads: int) -> None:
    with pytest.raises(ValueError, match=f"{threads} threads were requested from a pool of 2"):
        make_step(2).workers.run(1, threads)


def cpu_seconds(threads: set[threading.Thread]) -> float:
    """Return the processor time of running threads."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(it.ident or 0)) for it in threads)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the processor time of threads from Linux")
def test_idle_pool_uses_no_cpu_time(make_step: MakeStep, others: set[threading.Thread]) -> None:
    step = make_step(5)
    workers = set(threading.enumerate()) - others
    assert len(workers) == 4
    within_timeout(lambda: use(step, 5))
    time.sleep(ASLEEP)
    before = cpu_seconds(workers)
    time.sleep(2)
    assert cpu_seconds(workers) - before < 0.05 * 2
    within_timeout(lambda: use(step, 5))


def shared_steps(path: Path, code_cache: Path, pool: ThreadPool, *threads: int) -> list[CpuStep]:
    """Return steps of the same model, each with a maximum number of threads, on one thread pool."""
    return [load_step(path, code_cache, replace(CONFIG, threads=number), pool=pool) for number in threads]


def test_programs_share_the_threads_of_a_pool(
    path: Path, cpu_kernels: Path, others: set[threading.Thread], make_step: MakeStep
) -> None:
    """The largest program determines the number of threads, and the last one ends them."""
    pool = ThreadPool()
    steps = shared_steps(path, cpu_kernels, pool, 2, 4, 3)
    assert len(set(threading.enumerate()) - others) == 3
    for step in steps:
        step.workers.close()
        step.workers.close()
        assert pool.num_threads == (1 if step is steps[-1] else 4)
    assert set(threading.enumerate()) <= others
    with pytest.raises(ValueError, match="2 threads were requested from a pool of 1"):
        steps[0].workers.run(1, 2)
    (again,) = shared_steps(path, cpu_kernels, pool, 3)
    within_timeout(partial(use, again, 3))
    again.workers.close()
    assert set(threading.enumerate()) <= others


def test_programs_of_one_pool_compute_the_bits_of_their_own(path: Path, cpu_kernels: Path, make_step: MakeStep) -> None:
    """Steps of the programs alternate at random, from several threads, with random numbers of threads."""
    expected = computed(make_step(1), [50, *[1] * 60], lambda: 1)
    pool = ThreadPool()
    results: list[Tensor] = []

    def drive(step: CpuStep, most: int, seed: int) -> None:
        rng = random.Random(seed)
        results.append(computed(step, [50, *[1] * 60], lambda: rng.randint(1, most)))

    def work() -> None:
        limits = (2, 4, 3)
        steps = shared_steps(path, cpu_kernels, pool, *limits)
        drivers = [
            threading.Thread(target=drive, args=(step, most, seed), daemon=True)
            for seed, (step, most) in enumerate(zip(steps, limits, strict=True))
        ]
        for driver in drivers:
            driver.start()
        for driver in drivers:
            driver.join()

    within_timeout(work)
    assert len(results) == 3
    assert all(torch.equal(result, expected) for result in results)


def test_memory_of_a_closed_program_is_never_used_again(path: Path, cpu_kernels: Path, make_step: MakeStep) -> None:
    """One program is loaded, used, and closed again and again, and then overwritten, while another
    program of the same pool runs.
    """
    pool = ThreadPool()
    (lasting,) = shared_steps(path, cpu_kernels, pool, 3)
    expected = computed(make_step(1), [40, *[1] * 20], lambda: 1)
    stop = threading.Event()
    results: list[Tensor] = []

    def run_lasting() -> None:
        while not stop.is_set():
            results.append(computed(lasting, [40, *[1] * 20], lambda: 3))

    def work() -> None:
        driver = threading.Thread(target=run_lasting, daemon=True)
        driver.start()
        for _ in range(20):
            (step,) = shared_steps(path, cpu_kernels, pool, 3)
            assert torch.equal(computed(step, [40, *[1] * 20], lambda: 3), expected)
            step.workers.close()
            program, header = step.workers._keep
            program["op"][:] = 255  # a worker that reads it would fail
            header.view("u1")[:] = 255
        stop.set()
        driver.join()

    within_timeout(work)
    assert results
    assert all(torch.equal(result, expected) for result in results)


def test_pool_refuses_programs_that_were_compiled_otherwise(path: Path, cpu_kernels: Path) -> None:
    pool = ThreadPool()
    (step,) = shared_steps(path, cpu_kernels, pool, 2)
    with pytest.raises(ValueError, match="same processor"):
        pool.join(step.workers, lambda *words: 0)
    step.workers.close()


def test_dropped_pool_ends_its_threads(path: Path, cpu_kernels: Path, others: set[threading.Thread]) -> None:
    pool = ThreadPool()
    steps = shared_steps(path, cpu_kernels, pool, 3, 2)
    workers = set(threading.enumerate()) - others
    assert len(workers) == 2
    del steps, pool
    gc.collect()
    assert ended(workers)


def test_pool_without_a_thread_adds_no_program(
    path: Path, cpu_kernels: Path, others: set[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three workers cannot start. Later programs run."""
    pool, start, started = ThreadPool(), threading.Thread.start, list[threading.Thread]()

    def fail_second(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_second)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            shared_steps(path, cpu_kernels, pool, 4)
    assert pool.num_threads == 1
    assert set(threading.enumerate()) <= others
    (step,) = shared_steps(path, cpu_kernels, pool, 3)
    within_timeout(partial(use, step, 3))
    step.workers.close()
    assert set(threading.enumerate()) == others
