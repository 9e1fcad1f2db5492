"""Several generators heard as one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from app.server.choices import merge


class Source:
    """Yields numbers, then ends, fails, or waits for ever; knows whether it was closed."""

    def __init__(self, count: int, end: str = "") -> None:
        self.count, self.end = count, end
        self.closed = False

    async def items(self) -> AsyncGenerator[int]:
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                yield number
            if self.end == "fail":
                raise ValueError("a source failed")
            if self.end == "wait":
                await asyncio.Event().wait()
        finally:
            self.closed = True


def test_everything_arrives_in_its_sources_order() -> None:
    async def collect() -> list[tuple[int, int]]:
        return [item async for item in merge([Source(count).items() for count in (3, 0, 50)])]

    items = asyncio.run(collect())
    assert sorted(items) == [(0, n) for n in range(3)] + [(2, n) for n in range(50)]
    assert [number for index, number in items if index == 2] == list(range(50))


def test_one_that_fails_closes_the_others() -> None:
    sources = [Source(2, "wait"), Source(1, "fail"), Source(10**9)]

    async def collect() -> None:
        async with aclosing(merge([source.items() for source in sources])) as items:
            async for _ in items:
                pass

    with pytest.raises(ValueError, match="a source failed"):
        asyncio.run(collect())
    assert all(source.closed for source in sources)


def test_closing_early_closes_all_and_leaves_no_task() -> None:
    sources = [Source(10**9), Source(1, "wait"), Source(0, "wait")]

    async def collect() -> int:
        # Held here, so that it is not the garbage collector that closes them.
        generators = [source.items() for source in sources]
        async with aclosing(merge(generators)) as items:
            for _ in range(5):
                await anext(items)
            for _ in range(20):  # until the first one waits for somebody to take its item
                await asyncio.sleep(0)
        assert all(source.closed for source in sources)
        return len(asyncio.all_tasks())

    assert asyncio.run(collect()) == 1
