"""How many threads compute, by simulated clocks: follow what is clearly faster, be calm about noise, ask rarely."""

import random
from collections.abc import Callable

import pytest

from engine.backends.cpu.team import BURST, LONGEST_PAUSE, SHORTEST_PAUSE, TASTE, WINDOW, ThreadChoice

SEED = 18
Clock = Callable[[int, int], float]  # (threads, step) -> seconds


def simulate(choice: ThreadChoice, seconds: Clock, steps: int, first: int = 0) -> list[int]:
    """The numbers of threads that were used."""
    used = []
    for step in range(first, first + steps):
        threads = choice.next()
        choice.record(threads, seconds(threads, step))
        used.append(threads)
    return used


def undisturbed(threads: int, step: int) -> float:
    return 1.0 / threads


def busy_neighbour(rng: random.Random) -> Clock:
    """Of two cores one is shared: a step of two threads takes its share of time slices, or none."""

    def seconds(threads: int, step: int) -> float:
        return 1.0 if threads == 1 else (5.0 if rng.random() < 0.5 else 0.5)

    return seconds


def settled(choice: ThreadChoice, used: list[int]) -> float:
    """The share of steps with the number that the choice has come to."""
    return used.count(choice.current) / len(used)


def test_all_threads_are_used_from_the_first_step_on() -> None:
    for threads in (1, 2, 3, 4, 8, 62):
        choice = ThreadChoice(threads)
        assert choice.next() == threads
        assert settled(choice, simulate(choice, undisturbed, 2000)) > 0.9
        assert choice.current == threads


def test_a_busy_neighbour_makes_two_threads_one_and_its_end_makes_them_two_again() -> None:
    choice, rng = ThreadChoice(2), random.Random(SEED)
    simulate(choice, undisturbed, 200)
    assert choice.current == 2
    used = simulate(choice, busy_neighbour(rng), 400)
    assert choice.current == 1
    assert used[-100:].count(1) >= 80
    used = simulate(choice, undisturbed, 2 * LONGEST_PAUSE)
    assert choice.current == 2
    assert used[-100:].count(2) >= 80


def test_a_slower_neighbour_is_noticed_soon_when_one_thread_was_asked_before() -> None:
    """What was measured long ago is reason enough to ask again, before the pause is over."""
    choice = ThreadChoice(2)
    simulate(choice, undisturbed, 5000)
    used = simulate(choice, lambda threads, step: 1.0 if threads == 1 else 3.0, 3 * (WINDOW + BURST))
    assert 1 in used
    assert choice.current == 1


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_make_it_change_its_mind(seed: int) -> None:
    """Two threads are better on average, single steps tell nothing."""
    choice, rng = ThreadChoice(2), random.Random(seed)
    changes, before = 0, choice.current
    used = []
    for step in range(5000):
        used += simulate(choice, lambda threads, _: rng.uniform(0.7, 1.3) / threads, 1, step)
        changes += choice.current != before
        before = choice.current
    assert changes <= 2
    assert settled(choice, used) > 0.95


@pytest.mark.parametrize("threads", [2, 3, 4, 8, 16])
def test_questions_get_rarer_while_nothing_changes(threads: int) -> None:
    choice = ThreadChoice(threads)
    used = simulate(choice, undisturbed, 20 * LONGEST_PAUSE)
    first, later = used[: 4 * SHORTEST_PAUSE], used[-10 * LONGEST_PAUSE :]
    assert len(first) - first.count(threads) >= TASTE
    assert len(later) - later.count(threads) <= 10 * BURST


@pytest.mark.parametrize("threads", [2, 3, 4, 8, 16])
def test_steps_that_get_longer_and_longer_are_no_reason_to_ask_all_the_time(threads: int) -> None:
    """As they do while a conversation grows. What was measured at its beginning says nothing about now."""
    choice = ThreadChoice(threads)

    def seconds(used: int, step: int) -> float:
        return (1 + step / 300) * (1 + 0.3 * abs(threads - used) / threads)

    used = simulate(choice, seconds, 10_000)
    assert choice.current == threads
    assert settled(choice, used) > 0.9


@pytest.mark.parametrize("threads", [3, 4, 8])
def test_what_was_fast_once_is_no_reason_to_ask_all_the_time(threads: int) -> None:
    """A number of threads that was tried in better times, and is not next to the one in use now."""
    choice, rng = ThreadChoice(threads), random.Random(SEED)
    simulate(choice, lambda used, step: float(used * used), 3000)  # only one thread is any good
    assert choice.current == 1
    simulate(choice, lambda used, step: 1.5 / used, 3000)  # all are
    used = simulate(choice, lambda used, step: rng.uniform(40, 50) / used, 3000)  # and then all are slow
    assert choice.current == threads
    assert settled(choice, used) > 0.9


def test_a_hopeless_question_ends_soon() -> None:
    """One thread takes twice as long as two on a quiet machine: two steps say so, and a step may be long."""
    used = simulate(ThreadChoice(2), undisturbed, SHORTEST_PAUSE + BURST + 1)
    assert used.count(1) == TASTE


def test_one_thread_asks_nobody() -> None:
    assert set(simulate(ThreadChoice(1), undisturbed, 3000)) == {1}


def test_long_steps_are_not_probed() -> None:
    assert set(simulate(ThreadChoice(4, probing=False), lambda threads, step: float(threads), 3000)) == {4}
