"""The ledger: free memory by promises, and the choice of models to unload."""

import itertools
import random

import pytest

from app.models.residency.ledger import (
    HOST,
    MAX_COMBINED,
    Blocked,
    Bytes,
    Entry,
    Fits,
    Ledger,
    Never,
    Unload,
    Use,
    Wait,
)

GPU = "cuda:0"


def entry(name: str, size: int, use: Use = Use.IDLE, last_used: float = 0.0, *, untouched: int = 0) -> Entry:
    """Return a model of `size` bytes of host memory, of which `untouched` bytes of its cache are not in use yet."""
    held = Bytes(weights=size - untouched, cache=untouched)
    return Entry(name, {HOST: held}, use, last_used)


def ledger(available: int, *entries: Entry, limit: int | None = None) -> Ledger:
    return Ledger({HOST: available}, entries, {} if limit is None else {HOST: limit})


def test_untouched_caches_are_not_free() -> None:
    assert ledger(100).free(HOST) == 100
    assert ledger(100, entry("a", 50, untouched=30)).free(HOST) == 70
    assert ledger(20, entry("a", 50, untouched=30)).free(HOST) == 0


def test_unloading_returns_promised_and_used_bytes() -> None:
    held = ledger(100, entry("a", 50, untouched=30), entry("b", 40))
    assert held.free(HOST, ["a"]) == 100 + 20
    assert held.free(HOST, ["b"]) == 70 + 40
    assert held.free(HOST, ["a", "b"]) == 100 + 20 + 40


def test_limit_counts_promises() -> None:
    held = ledger(1000, entry("a", 50, untouched=30), entry("b", 40), limit=100)
    assert held.free(HOST) == 10
    assert held.free(HOST, ["a"]) == 60


def test_model_that_fits_unloads_nothing() -> None:
    assert ledger(100, entry("a", 50)).plan({HOST: 100}) == Fits()


def test_smallest_sufficient_model_is_unloaded_first() -> None:
    held = [entry("small", 10), entry("middle", 40), entry("large", 80)]
    assert ledger(5, *held).plan({HOST: 40}) == Unload(["middle"])
    assert ledger(5, *held).plan({HOST: 60}) == Unload(["large"])
    assert ledger(5, *held).plan({HOST: 12}) == Unload(["small"])


def test_two_small_models_are_unloaded_rather_than_a_larger_one() -> None:
    held = ledger(0, entry("a", 20), entry("b", 20), entry("c", 70))
    verdict = held.plan({HOST: 40})
    assert isinstance(verdict, Unload)
    assert set(verdict.names) == {"a", "b"}


def test_least_recently_used_model_of_several_equal_ones_is_unloaded() -> None:
    held = [entry("new", 40, last_used=9.0), entry("old", 40, last_used=1.0), entry("mid", 40, last_used=5.0)]
    for order in itertools.permutations(held):
        assert ledger(0, *order).plan({HOST: 30}) == Unload(["old"])


def test_parked_caches_are_given_up_before_any_model() -> None:
    held = ledger(0, entry("idle", 30, last_used=1.0), entry("parked", 50, Use.PARKED, last_used=9.0))
    assert held.plan({HOST: 30}) == Unload(["parked"])


def test_busy_models_are_waited_for_only_if_idle_ones_do_not_suffice() -> None:
    held = [entry("idle", 30), entry("busy", 50, Use.BUSY)]
    assert ledger(0, *held).plan({HOST: 30}) == Unload(["idle"])
    assert ledger(0, *held).plan({HOST: 45}) == Wait(["busy"])
    background = [entry("background", 50, Use.BACKGROUND), entry("busy", 50, Use.BUSY)]
    assert ledger(0, *background).plan({HOST: 50}) == Wait(["background"])


def test_kept_models_are_never_chosen() -> None:
    held = ledger(0, entry("pinned", 50, Use.KEPT), entry("idle", 10))
    assert held.plan({HOST: 10}) == Unload(["idle"])
    assert held.plan({HOST: 40}) == Blocked(["pinned"])


def test_parked_cache_of_the_model_itself_is_dropped_if_nothing_else_suffices() -> None:
    own = Entry("own", {HOST: Bytes(cache=100, touched=100)}, Use.KEPT)
    other = Entry("other", {HOST: Bytes(weights=100)}, Use.IDLE)
    held = Ledger({HOST: 10_000}, [own, other], limits={HOST: 500})
    assert held.plan({HOST: 350}, "own") == Unload(["other"])
    assert held.plan({HOST: 450}, "own") == Unload(["own"])
    assert held.plan({HOST: 450}) == Blocked(["own"])


def test_model_that_is_too_large_alone_unloads_nothing() -> None:
    assert ledger(10, entry("a", 50)).plan({HOST: 61}) == Never(HOST, 61, 60)
    assert ledger(10, entry("a", 50), limit=55).plan({HOST: 60}) == Never(HOST, 60, 55)


def test_each_memory_must_suffice() -> None:
    on_gpu = Entry("gpu", {GPU: Bytes(weights=60)}, Use.IDLE)
    held = Ledger({HOST: 100, GPU: 10}, [on_gpu, entry("cpu", 50)])
    assert held.plan({HOST: 100, GPU: 10}) == Fits()
    assert held.plan({HOST: 100, GPU: 20}) == Unload(["gpu"])
    assert held.plan({HOST: 120, GPU: 5}) == Unload(["cpu"])


@pytest.mark.parametrize("count", [3, MAX_COMBINED, MAX_COMBINED + 4])
def test_plans_for_random_machines_suffice_and_unload_no_busy_model(count: int) -> None:
    draw = random.Random(count)
    for _ in range(40):
        entries = [entry(f"m{n}", draw.randrange(1, 60), draw.choice(list(Use)), draw.random()) for n in range(count)]
        held, needed = ledger(draw.randrange(30), *entries), draw.randrange(1, 60 * count)
        uses = {one.name: one.use for one in entries}
        match held.plan({HOST: needed}):
            case Fits():
                assert held.free(HOST) >= needed
            case Unload(names):
                assert held.free(HOST, names) >= needed
                assert {uses[name] for name in names} <= {Use.PARKED, Use.IDLE}
            case Wait(names):
                assert held.free(HOST, names) >= needed
                assert Use.KEPT not in {uses[name] for name in names}
            case Blocked():
                assert held.free(HOST, [one.name for one in entries if one.use is not Use.KEPT]) < needed
            case Never(_, _, available):
                assert available == held.free(HOST, [one.name for one in entries]) < needed
