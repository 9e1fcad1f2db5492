"""The number of drafted tokens that a step verifies, and the estimates it is based on."""

import random
from functools import lru_cache

import pytest

from engine.cost_model import FRESH, SmallSteps
from engine.draft import Draft, Source
from engine.drafting.acceptance import MAX_DRAFT, Acceptance
from engine.drafting.plan import MIN_GAIN, Room, choose_drafts


def draft(match_length: int, count: int = MAX_DRAFT) -> Draft:
    return Draft(Source.HISTORY, match_length, tuple(range(count)))


@lru_cache
def learned(chance: float) -> Acceptance:
    """Return estimates after many drafts whose tokens are right with this chance."""
    acceptance, rng = Acceptance(), random.Random(3)
    for _ in range(3000):
        for match_length in (3, 8, 16, 30):
            acceptance.observe(draft(match_length, 1), [0 if rng.random() < chance else 1])
    return acceptance


def chosen(acceptance: Acceptance, seconds: list[float], drafts: dict[int, Draft], decoding: int = 1) -> dict[int, int]:
    """Return the number of drafted tokens per request, with `seconds[n]` as the time of a step of n tokens."""
    room = Room(decoding, most=len(seconds) - 1 - decoding)
    planned = choose_drafts(drafts, acceptance, lambda tokens: seconds[tokens], room)
    return {request_id: len(it.token_ids) for request_id, it in planned.drafts.items()}


LINEAR = [float(tokens) for tokens in range(40)]  # no token is cheaper than the first
FLAT = [1.0] * 40  # further tokens cost nothing
TYPICAL = [0.8 + 0.2 * tokens for tokens in range(40)]


def test_no_drafts_if_each_token_costs_a_step() -> None:
    assert chosen(learned(0.95), LINEAR, {1: draft(30)}) == {}


def test_whole_drafts_are_verified_if_further_tokens_are_free() -> None:
    assert chosen(learned(0.5), FLAT, {1: draft(30), 2: draft(3, 4)}, decoding=2) == {1: MAX_DRAFT, 2: 4}


@pytest.mark.parametrize(("chance", "least", "most"), [(0.1, 0, 0), (0.6, 1, 4), (0.95, 8, MAX_DRAFT)])
def test_number_of_tokens_follows_the_acceptance(chance: float, least: int, most: int) -> None:
    assert least <= chosen(learned(chance), TYPICAL, {1: draft(16)}).get(1, 0) <= most


def test_tokens_that_come_without_drafts_are_no_gain() -> None:
    """A grammar that forces five of six tokens: a drafted token saves a sixth of a step."""
    acceptance, room = learned(0.95), Room(1, most=15)
    plain = choose_drafts({1: draft(16)}, acceptance, TYPICAL.__getitem__, room)
    forced = choose_drafts({1: draft(16)}, acceptance, TYPICAL.__getitem__, room, {1: 6.0})
    assert plain.drafts[1].token_ids
    assert forced.drafts == {}


def test_better_draft_gets_more_tokens() -> None:
    acceptance = Acceptance()
    counts = chosen(acceptance, TYPICAL, {1: draft(24), 2: draft(3)}, decoding=2)
    assert counts[1] > counts.get(2, 0)


def test_choice_has_the_highest_rate_of_all_counts() -> None:
    """Against a search over every number of tokens of a single draft."""
    rng = random.Random(8)
    for _ in range(200):
        seconds = [0.0, 1.0]
        while len(seconds) < 20:
            seconds.append(seconds[-1] + rng.random() * 0.5)
        acceptance, drafts = learned(rng.choice([0.2, 0.6, 0.8, 0.95])), {1: draft(rng.choice([3, 8, 30]))}
        reached = list(acceptance.reach(drafts[1]))
        rates = [(1 + sum(reached[:count])) / seconds[1 + count] for count in range(len(reached) + 1)]
        best = max(range(len(rates)), key=rates.__getitem__)
        count = chosen(acceptance, seconds, drafts).get(1, 0)
        assert count == (best if rates[best] > MIN_GAIN * rates[0] else 0)


def test_estimates_follow_what_was_sampled() -> None:
    acceptance = Acceptance()
    before = acceptance.chance(Source.HISTORY, 8)
    for _ in range(100):
        acceptance.observe(draft(8, 3), [0, 9, 2])  # the second token is wrong, so the third is not compared
    assert acceptance.chance(Source.HISTORY, 8) == pytest.approx((0 + 1) / 2, abs=0.5)
    assert acceptance.chance(Source.CORPUS, 8) == before
    wrong = Acceptance()
    for _ in range(200):
        wrong.observe(draft(30, 1), [1])
    assert wrong.chance(Source.HISTORY, 30) < 0.01


def test_small_steps_are_interpolated_and_extrapolated() -> None:
    steps = SmallSteps()
    assert steps.expected(8) > steps.expected(1) > 0
    for _ in range(50):
        steps.observe(1, 0.010)
        steps.observe(8, 0.024)
    assert steps.expected(1) == pytest.approx(0.010)
    assert steps.expected(8) == pytest.approx(0.024)
    assert 0.010 < steps.expected(4) < 0.024
    assert steps.expected(16) > 0.024


def test_an_old_measurement_is_not_used() -> None:
    steps = SmallSteps()
    steps.observe(8, 5.0)  # another program used the processor
    for _ in range(2 * FRESH):
        steps.observe(1, 0.010)
    assert steps.expected(8) < 0.1
