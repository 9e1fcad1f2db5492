"""Memory that unloads did not free: what is measured, and what is still counted later."""

from app.models.residency.ledger import HOST, Bytes, Entry, Use
from app.models.residency.unfreed import ALLOWED_BYTES, Unfreed, uncounted, unfreed_by

WEIGHTS = 1_000_000_000


def test_memory_of_steps_and_of_an_unused_cache_is_not_expected() -> None:
    held = {HOST: Bytes(weights=WEIGHTS, steps=300_000_000, cache=WEIGHTS, touched=0)}
    assert unfreed_by(held, {HOST: WEIGHTS}, {HOST: 0}, {}) == {}
    assert unfreed_by(held, {HOST: WEIGHTS}, {HOST: ALLOWED_BYTES}, {}) == {}
    left = ALLOWED_BYTES + 1
    assert unfreed_by(held, {HOST: WEIGHTS}, {HOST: left}, {}) == {HOST: Unfreed(left, left)}


def test_memory_that_cannot_be_measured_is_left_out() -> None:
    held = {HOST: Bytes(weights=WEIGHTS), "cuda:0": Bytes(weights=WEIGHTS)}
    assert unfreed_by(held, {HOST: WEIGHTS}, {HOST: WEIGHTS}, {}) == {HOST: Unfreed(WEIGHTS, WEIGHTS)}
    assert unfreed_by(held, {}, {}, {}) == {}


def test_later_unloads_add_to_what_is_left_of_earlier_ones() -> None:
    held, half = {HOST: Bytes(weights=WEIGHTS)}, WEIGHTS // 2
    first = unfreed_by(held, {HOST: WEIGHTS}, {HOST: half}, {})
    assert first == {HOST: Unfreed(half, half)}
    second = unfreed_by(held, {HOST: half + WEIGHTS}, {HOST: WEIGHTS}, first)
    assert second == {HOST: Unfreed(WEIGHTS, WEIGHTS)}
    assert unfreed_by(held, {HOST: WEIGHTS}, {HOST: 0}, first) == {}


def test_memory_that_is_freed_later_is_no_longer_counted() -> None:
    unfreed = Unfreed(100, uncounted=1000)
    assert [unfreed.left(now) for now in (2000, 1000, 990, 900, 0)] == [100, 100, 90, 0, 0]


def test_entries_count_what_they_have_touched() -> None:
    entry = Entry("a", {HOST: Bytes(weights=60, cache=30, touched=10)}, Use.IDLE)
    assert uncounted({HOST: 100, "cuda:0": 5}, [entry]) == {HOST: 30, "cuda:0": 5}
    assert uncounted({HOST: 100}, [entry], without="a") == {HOST: 100}
