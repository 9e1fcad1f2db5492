"""Distribution of work among threads: each unit is claimed exactly once."""

import random

import numpy as np
import pytest

from engine.backends.cpu.interpreter import _claim

SEED = 20
COUNT = 3  # number of instructions in the program

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 16, 62])
def test_each_unit_is_claimed_exactly_once(threads: int) -> None:
    """Some threads are up to 100 times faster than others."""
    rng = random.Random(SEED)
    for units in [*range(40), 63, 64, 65, 127, 500, 1536, 5000, 49_153]:
        tickets = np.zeros(COUNT * threads, np.int64)
        claimed, active = np.zeros(units, np.int64), list(range(threads))
        speeds = [rng.choice([1, 1, 1, 100]) for _ in range(threads)]
        while active:
            thread = rng.choices(active, [speeds[number] for number in active])[0]
            first, last = _claim(tickets.ctypes.data, 1, COUNT, units, thread, threads)
            if first >= last:
                active.remove(thread)
            claimed[first:last] += 1
        assert (claimed == 1).all()
        assert not tickets.reshape(threads, COUNT)[:, [0, 2]].any()  # the tickets of the other instructions are unused


def test_single_active_thread_claims_all_units() -> None:
    tickets, done = np.zeros(COUNT * 4, np.int64), 0
    while (claimed := _claim(tickets.ctypes.data, 2, COUNT, 1000, 3, 4))[0] < claimed[1]:
        done += claimed[1] - claimed[0]
    assert done == 1000
