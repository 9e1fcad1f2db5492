"""How many threads compute, by simulated clocks: follow what is clearly faster, be calm about noise, ask rarely."""

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
    """The numbers of threads that were used."""
    used = []
    for step in range(first, first + steps):
        threads = tuner.next()
        tuner.record(threads, seconds(threads, step))
        used.append(threads)
    return used


def undisturbed(threads: int, step: int) -> float:
    return 1.0 / threads


def other_program(rng: random.Random) -> Clock:
    """Of two cores one is shared: a step of two threads takes its share of time slices, or none."""

    def seconds(threads: int, step: int) -> float:
        return 1.0 if threads == 1 else (5.0 if rng.random() < 0.5 else 0.5)

    return seconds


def settled(tuner: ThreadTuner, used: list[int]) -> float:
    """The share of steps with the number that the tuner has come to."""
    return used.count(tuner.current) / len(used)


def test_all_threads_are_used_from_the_first_step_on() -> None:
    for threads in (1, 2, 3, 4, 8, 62):
        tuner = ThreadTuner(threads)
        assert tuner.next() == threads
        assert settled(tuner, simulate(tuner, undisturbed, 2000)) > 0.9
        assert tuner.current == threads


def test_a_busy_neighbour_makes_two_threads_one_and_its_end_makes_them_two_again() -> None:
    tuner, rng = ThreadTuner(2), random.Random(SEED)
    simulate(tuner, undisturbed, 200)
    assert tuner.current == 2
    used = simulate(tuner, other_program(rng), 400)
    assert tuner.current == 1
    assert used[-100:].count(1) >= 80
    used = simulate(tuner, undisturbed, 2 * LONGEST_PAUSE)
    assert tuner.current == 2
    assert used[-100:].count(2) >= 80


def test_a_slower_neighbour_is_noticed_soon_when_one_thread_was_asked_before() -> None:
    """What was measured long ago is reason enough to ask again, before the pause is over."""
    tuner = ThreadTuner(2)
    simulate(tuner, undisturbed, 5000)
    used = simulate(tuner, lambda threads, step: 1.0 if threads == 1 else 3.0, 3 * (WINDOW + PROBE_STEPS))
    assert 1 in used
    assert tuner.current == 1


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_make_it_change_its_mind(seed: int) -> None:
    """Two threads are better on average, single steps tell nothing."""
    tuner, rng = ThreadTuner(2), random.Random(seed)
    changes, before = 0, tuner.current
    used = []
    for step in range(5000):
        used += simulate(tuner, lambda threads, _: rng.uniform(0.7, 1.3) / threads, 1, step)
        changes += tuner.current != before
        before = tuner.current
    assert changes <= 2
    assert settled(tuner, used) > 0.95


@pytest.mark.parametrize("threads", [2, 3, 4, 8, 16])
def test_questions_get_rarer_while_nothing_changes(threads: int) -> None:
    tuner = ThreadTuner(threads)
    used = simulate(tuner, undisturbed, 20 * LONGEST_PAUSE)
    first, later = used[: 4 * SHORTEST_PAUSE], used[-10 * LONGEST_PAUSE :]
    assert len(first) - first.count(threads) >= PROBE_CHECK_STEPS
    assert len(later) - later.count(threads) <= 10 * PROBE_STEPS


@pytest.mark.parametrize("threads", [2, 3, 4, 8, 16])
def test_steps_that_get_longer_and_longer_are_no_reason_to_ask_all_the_time(threads: int) -> None:
    """As they do while a conversation grows. What was measured at its beginning says nothing about now."""
    tuner = ThreadTuner(threads)

    def seconds(used: int, step: int) -> float:
        return (1 + step / 300) * (1 + 0.3 * abs(threads - used) / threads)

    used = simulate(tuner, seconds, 10_000)
    assert tuner.current == threads
    assert settled(tuner, used) > 0.9


@pytest.mark.parametrize("threads", [3, 4, 8])
def test_what_was_fast_once_is_no_reason_to_ask_all_the_time(threads: int) -> None:
    """A number of threads that was tried in better times, and is not next to the one in use now."""
    tuner, rng = ThreadTuner(threads), random.Random(SEED)
    simulate(tuner, lambda used, step: float(used * used), 3000)  # only one thread is any good
    assert tuner.current == 1
    simulate(tuner, lambda used, step: 1.5 / used, 3000)  # all are
    used = simulate(tuner, lambda used, step: rng.uniform(40, 50) / used, 3000)  # and then all are slow
    assert tuner.current == threads
    assert settled(tuner, used) > 0.9


def test_a_hopeless_question_ends_soon() -> None:
    """One thread takes twice as long as two on a quiet machine: two steps say so, and a step may be long."""
    used = simulate(ThreadTuner(2), undisturbed, SHORTEST_PAUSE + PROBE_STEPS + 1)
    assert used.count(1) == PROBE_CHECK_STEPS


def test_one_thread_asks_nobody() -> None:
    assert set(simulate(ThreadTuner(1), undisturbed, 3000)) == {1}


def test_long_steps_are_not_probed() -> None:
    assert set(simulate(ThreadTuner(4, probing=False), lambda threads, step: float(threads), 3000)) == {4}
