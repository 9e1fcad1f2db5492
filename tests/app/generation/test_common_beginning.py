"""The longest common beginning, against counting one by one."""

import random
from itertools import takewhile

from app.generation.recent_prompts import num_common


def test_it_is_what_counting_finds() -> None:
    chance = random.Random()
    for _ in range(2000):
        common = chance.randbytes(chance.randrange(70))
        one, other = (common + bytes(chance.choices((0, 1), k=chance.randrange(9))) for _ in range(2))
        expected = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
        for start in range(0, expected + 1, 7):
            assert num_common(one, other, start) == num_common(tuple(one), tuple(other), start) == expected
