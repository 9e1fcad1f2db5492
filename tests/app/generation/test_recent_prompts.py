"""The longest common prefix equals that of a plain comparison, and the memory is bounded."""

import random
from collections.abc import Sequence
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from app.generation.recent_prompts import Exchange, RecentPrompts, common_prefix_len, packed, unpacked

# Few different ids, for long common prefixes. Long runs, to cross the steps of the search.
IDS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 1500)), max_size=6).map(
    lambda runs: [token_id for token_id, count in runs for _ in range(count)]
)


def exchange(ids: Sequence[int], *, salt: str = "", computed: int = 0) -> Exchange:
    return Exchange(salt, packed(ids), len(ids), computed)


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


@given(st.lists(st.tuples(IDS, st.sampled_from(("", "a"))), max_size=8), IDS.filter(bool), st.sampled_from(("", "a")))
def test_nearest_has_the_longest_common_prefix(
    known: list[tuple[list[int], str]], prompt: list[int], salt: str
) -> None:
    recent = RecentPrompts()
    for ids, its_salt in known:
        recent.remember(exchange(ids, salt=its_salt))
    found = recent.nearest(packed(prompt), salt)
    shared = [in_common(ids, prompt) for ids, its_salt in known if its_salt == salt]
    assert (found is None) == (not shared)
    if found is not None:
        assert found.common == max(shared) == in_common(unpacked(found.exchange.ids), prompt)
        assert found.exchange.salt == salt


def test_latest_exchange_wins_a_tie() -> None:
    recent = RecentPrompts()
    for last in (7, 8, 9):
        recent.remember(exchange([1, 2, 3, last]))
    found = recent.nearest(packed([1, 2, 3, 4]), "")
    assert found is not None
    assert list(unpacked(found.exchange.ids)) == [1, 2, 3, 9]
    nothing_in_common = recent.nearest(packed([5]), "")
    assert nothing_in_common is not None
    assert (nothing_in_common.common, nothing_in_common.exchange) == (0, found.exchange)


def test_growing_conversation_is_one_exchange() -> None:
    recent = RecentPrompts(max_exchanges=2)
    recent.remember(exchange([9] * 20, computed=20))
    for turn in range(1, 30):
        recent.remember(exchange([1] * 10 * turn, computed=10 * turn if turn < 20 else 0))
    other, own = recent.nearest(packed([9] * 20), ""), recent.nearest(packed([1] * 400), "")
    assert other is not None
    assert own is not None
    assert (other.common, own.common, own.exchange.computed) == (20, 290, 190)


def test_repeated_prompt_becomes_latest_and_keeps_its_reply() -> None:
    recent = RecentPrompts(max_exchanges=2)
    recent.remember(Exchange("", packed([1, 2, 3, 4]), 2, computed=3))
    recent.remember(exchange([5, 6]))
    recent.remember(exchange([1, 2], computed=0))
    recent.remember(exchange([7, 8]))
    found = recent.nearest(packed([1, 2, 3, 4, 5]), "")
    assert found is not None
    assert (found.common, found.exchange.prompt_tokens, found.exchange.computed) == (4, 2, 3)
    gone = recent.nearest(packed([5, 6]), "")
    assert gone is not None
    assert gone.common == 0


def test_oldest_exchanges_are_dropped_beyond_the_limits() -> None:
    recent = RecentPrompts(max_exchanges=3, max_tokens=100)
    for first in range(10):
        recent.remember(exchange([first] * 10))
    assert [first for first in range(10) if (it := recent.nearest(packed([first]), "")) and it.common] == [7, 8, 9]
    recent.remember(exchange([50] * 85))
    assert [first for first in range(10) if (it := recent.nearest(packed([first]), "")) and it.common] == [9]
    recent.remember(exchange([60] * 101))
    assert recent.nearest(packed([60]), "") is None


def test_common_prefix_length_equals_a_plain_count(chance: random.Random) -> None:
    for _ in range(2000):
        common = chance.randbytes(chance.randrange(70))
        one, other = (common + bytes(chance.choices((0, 1), k=chance.randrange(9))) for _ in range(2))
        expected = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
        for start in range(0, expected + 1, 7):
            assert common_prefix_len(one, other, start) == expected
            assert common_prefix_len(tuple(one), tuple(other), start) == expected
