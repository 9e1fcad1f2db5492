"""How work is shared out: every unit once, whoever asks, in whatever order."""

import random

import numpy as np
import pytest

from engine.backends.cpu.interpreter import _claim

SEED = 20
COUNT = 3  # instructions of the program whose tickets these are

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 16, 62])
def test_every_unit_is_claimed_once(threads: int) -> None:
    """However fast each thread is: some are asked all the time, some hardly ever."""
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
        assert not tickets.reshape(threads, COUNT)[:, [0, 2]].any()  # those of other instructions


def test_a_thread_that_is_left_alone_does_the_work_of_all() -> None:
    tickets, done = np.zeros(COUNT * 4, np.int64), 0
    while (claimed := _claim(tickets.ctypes.data, 2, COUNT, 1000, 3, 4))[0] < claimed[1]:
        done += claimed[1] - claimed[0]
    assert done == 1000
