"""The choice of the number of threads, with simulated step times."""

import random
from collections.abc import Callable

import pytest

from engine.backends.cpu.thread_pool import (
    LONGEST_PAUSE,
    PROBE_CHECK_STEPS,
    PROBE_STEPS,
    SHORTEST_PAUSE,
    WINDOW,
    ThreadTuner,
)

SEED = 18
Clock = Callable[[int, int], float]  # (threads, step) -> seconds


def simulate(tuner: ThreadTuner, seconds: Clock, steps: int, first: int = 0) -> list[int]:
    """Run steps. Returns the number of threads used in each."""
    used = []
    for step in range(first, first + steps):
        threads = tuner.next()
        tuner.record(threads, seconds(threads, step))
        used.append(threads)
    return used


def quiet_machine(threads: int, step: int) -> float:
    return 1.0 / threads


def other_program(rng: random.Random) -> Clock:
    """Simulate another program on one of two cores: steps of two threads are slow half of the time."""

    def seconds(threads: int, step: int) -> float:
        return 1.0 if threads == 1 else (5.0 if rng.random() < 0.5 else 0.5)

    return seconds


def share_of_current(tuner: ThreadTuner, used: list[int]) -> float:
    """Return the share of steps that used the current number of threads."""
    return used.count(tuner.current) / len(used)


def test_tuner_starts_with_all_threads() -> None:
    for threads in (1, 2, 3, 4, 8, 62):
        tuner = ThreadTuner(threads)
        assert tuner.next() == threads
        assert share_of_current(tuner, simulate(tuner, quiet_machine, 2000)) > 0.9
        assert tuner.current == threads


def test_tuner_adapts_to_a_busy_core_and_back() -> None:
    tuner, rng = ThreadTuner(2), random.Random(SEED)
    simulate(tuner, quiet_machine, 200)
    assert tuner.current == 2
    used = simulate(tuner, other_program(rng), 400)
    assert tuner.current == 1
    assert used[-100:].count(1) >= 80
    used = simulate(tuner, quiet_machine, 2 * LONGEST_PAUSE)
    assert tuner.current == 2
    assert used[-100:].count(2) >= 80


def test_earlier_probe_speeds_up_the_reaction() -> None:
    """A tuner that has measured a number of threads before probes it again before the pause is over."""
    tuner = ThreadTuner(2)
    simulate(tuner, quiet_machine, 5000)
    used = simulate(tuner, lambda threads, step: 1.0 if threads == 1 else 3.0, 3 * (WINDOW + PROBE_STEPS))
    assert 1 in used
    assert tuner.current == 1


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_change_the_number_of_threads(seed: int) -> None:
    """On average two threads are faster, but single steps vary."""
    tuner, rng = ThreadTuner(2), random.Random(seed)
    changes, before = 0, tuner.current
    used = []
    for step in range(5000):
        used += simulate(tuner, lambda threads, _: rng.uniform(0.7, 1.3) / threads, 1, step)
        changes += tuner.current != before
        before = tuner.current
    assert changes <= 2
    assert share_of_current(tuner, used) > 0.95


@pytest.mark.parametrize("threads", [2, 3, 4, 8, 16])
def test_probes_become_rarer_while_nothing_changes(threads: int) -> None:
    tuner = ThreadTuner(threads)
    used = simulate(tuner, quiet_machine, 20 * LONGEST_PAUSE)
    first, later = used[: 4 * SHORTEST_PAUSE], used[-10 * LONGEST_PAUSE :]
    assert len(first) - first.count(threads) >= PROBE_CHECK_STEPS
    assert len(later) - later.count(threads) <= 10 * PROBE_STEPS


@pytest.mark.parametrize("threads", [2, 3, 4, 8, 16])
def test_growing_step_times_do_not_cause_frequent_probes(threads: int) -> None:
    """Step times grow during a conversation, so measurements from its start become outdated."""
    tuner = ThreadTuner(threads)

    def seconds(used: int, step: int) -> float:
        return (1 + step / 300) * (1 + 0.3 * abs(threads - used) / threads)

    used = simulate(tuner, seconds, 10_000)
    assert tuner.current == threads
    assert share_of_current(tuner, used) > 0.9


@pytest.mark.parametrize("threads", [3, 4, 8])
def test_outdated_measurements_do_not_cause_frequent_probes(threads: int) -> None:
    """The outdated measurement is for a number of threads that is not adjacent to the current one."""
    tuner, rng = ThreadTuner(threads), random.Random(SEED)
    simulate(tuner, lambda used, step: float(used * used), 3000)  # steps are fast with one thread only
    assert tuner.current == 1
    simulate(tuner, lambda used, step: 1.5 / used, 3000)  # steps are fast with any number of threads
    # steps are slow with any number of threads
    used = simulate(tuner, lambda used, step: rng.uniform(40, 50) / used, 3000)
    assert tuner.current == threads
    assert share_of_current(tuner, used) > 0.9


def test_probe_of_a_much_slower_number_ends_early() -> None:
    """On an idle machine, one thread takes twice as long as two. Two steps are enough to measure the difference."""
    used = simulate(ThreadTuner(2), quiet_machine, SHORTEST_PAUSE + PROBE_STEPS + 1)
    assert used.count(1) == PROBE_CHECK_STEPS


def test_single_thread_never_probes() -> None:
    assert set(simulate(ThreadTuner(1), quiet_machine, 3000)) == {1}


def test_probing_can_be_disabled() -> None:
    assert set(simulate(ThreadTuner(4, probing=False), lambda threads, step: float(threads), 3000)) == {4}


def test_probes_of_fewer_threads_are_rare_while_all_compute() -> None:
    used = simulate(ThreadTuner(2), quiet_machine, 1000)
    assert used.count(1) == 2 * PROBE_CHECK_STEPS
