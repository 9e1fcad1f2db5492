"""Tests for garbage collection while the chat is idle."""

import asyncio
import gc
import weakref
from contextlib import suppress

import pytest

from tui.idle_gc import IdleCollector, collect_when_idle


class Ring:
    """An object that only the garbage collector can free, because it refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_when_idle() -> None:
    tidying, ring, frozen = IdleCollector(5.0), weakref.ref(Ring()), gc.get_freeze_count()
    try:
        assert not tidying.poll(5.5)
        assert not tidying.poll(6.0)
        assert ring() is not None
        assert tidying.poll(6.01)
        assert ring() is None
        assert not tidying.poll(6.02)  # idle, but too little CPU time used since the last collection
        assert not tidying.poll(7.2)
        assert tidying.poll(7.21)
        assert gc.get_freeze_count() > frozen
    finally:
        tidying.close()
    assert gc.get_freeze_count() == 0


def test_gc_thresholds_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    unfrozen: list[None] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: unfrozen.append(None))

    async def show() -> None:
        before = gc.get_threshold()
        running = asyncio.create_task(collect_when_idle())
        await asyncio.sleep(0)
        assert gc.get_threshold()[2] > 1 << 20
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        assert gc.get_threshold() == before
        assert not unfrozen  # nothing was frozen

    asyncio.run(show())
