"""Pulls that several follow, wait for each other, are left, and are stopped; and the removal of what they brought."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from app.errors import DownloadStopped, ModelNotFound, Offline
from app.models.pulls import PullProgress, Pulls, PullState
from app.models.repository import RepositoryName
from app.models.store import ModelStore
from app.settings.settings import Settings
from tests.app.models.fake_hub import FakeHub, serve
from tests.app.models.tiny_model import settings_in

ONE, TWO = "org/One", "org/Two"
FILE = "tiny-Q4_0.gguf"
SIZE = 400_000


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve() as served:
        served.repositories = {ONE: {FILE: b"1" * SIZE}, TWO: {FILE: b"2" * SIZE}}
        yield served


@pytest.fixture
def settings(hub: FakeHub, tmp_path: Path) -> Settings:
    return settings_in(tmp_path, hub_endpoint=hub.address)


async def follow(pulls: Pulls, name: str) -> list[PullProgress]:
    return [progress async for progress in pulls.pull(name)]


async def some_bytes(events: AsyncGenerator[PullProgress]) -> PullProgress:
    """The first event of bytes that have arrived."""
    async for progress in events:
        if progress.done:
            return progress
    raise AssertionError("it has ended")


def is_stored(settings: Settings, name: str) -> bool:
    return ModelStore(settings).hub_models.find(RepositoryName(name)) is not None


def test_a_pull_tells_how_it_goes_and_ends_with_the_stored_model(settings: Settings) -> None:
    events = asyncio.run(follow(Pulls(settings), ONE))
    assert [events[0].state, events[-1].state] == [PullState.WAITING, PullState.DONE]
    assert {progress.name for progress in events} == {ONE}
    assert any(progress.total == SIZE and progress.label.startswith("Downloading") for progress in events)
    stored = events[-1].stored
    assert stored
    assert stored.path.read_bytes() == b"1" * SIZE


def test_all_who_follow_share_one_download_and_one_may_leave(hub: FakeHub, settings: Settings) -> None:
    hub.pace = 0.005

    async def work() -> list[list[PullProgress]]:
        pulls = Pulls(settings)
        others = [asyncio.create_task(follow(pulls, name)) for name in (ONE, f"hf.co/{ONE}")]
        async with aclosing(pulls.pull(ONE)) as leaving:
            await some_bytes(leaving)
        return await asyncio.gather(*others)

    for events in asyncio.run(work()):
        assert events[-1].state is PullState.DONE
    assert sum("/resolve/" in path for path, _ in hub.downloads()) == 1


def test_the_last_who_leaves_stops_it_and_another_pull_goes_on_there(hub: FakeHub, settings: Settings) -> None:
    hub.pace = 0.005

    async def work() -> None:
        pulls = Pulls(settings)
        async with aclosing(pulls.pull(ONE)) as events:
            await some_bytes(events)
        assert await follow(pulls, ONE)

    asyncio.run(work())
    assert is_stored(settings, ONE)
    (rest,) = hub.ranges_asked_for()
    assert 0 < int(rest.removeprefix("bytes=").rstrip("-")) < SIZE
    assert hub.sent < 1.5 * SIZE


def test_one_after_another_in_the_order_of_asking(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes to see that the first one is not there yet."""
    hub.pace = 0.002
    is_there = Pulls._is_there

    def slowly_seen(pulls: Pulls, name: str) -> bool:
        time.sleep(0.1 if name == ONE else 0)
        return is_there(pulls, name)

    monkeypatch.setattr(Pulls, "_is_there", slowly_seen)

    async def work() -> None:
        pulls = Pulls(settings)
        first, second = (asyncio.create_task(follow(pulls, name)) for name in (ONE, TWO))
        while not any(progress.done for progress in pulls.now()):
            await asyncio.sleep(0.001)
        assert [(progress.name, progress.state) for progress in pulls.now()] == [
            (ONE, PullState.RUNNING),
            (TWO, PullState.WAITING),
        ]
        assert (await first)[-1].state is PullState.DONE
        assert not is_stored(settings, TWO)
        async with asyncio.timeout(60):
            await follow(pulls, ONE)  # what is stored does not wait
        await second
        assert pulls.now() == []

    asyncio.run(work())
    assert is_stored(settings, TWO)


def test_what_waits_and_what_runs_can_be_deleted(hub: FakeHub, settings: Settings) -> None:
    hub.pace = 0.005

    async def work() -> None:
        pulls = Pulls(settings)
        waiting = pulls.pull(TWO)
        async with aclosing(pulls.pull(ONE)) as running, aclosing(waiting):
            await some_bytes(running)
            await anext(waiting)
            with pytest.raises(ModelNotFound):  # nothing of it is there
                await pulls.delete(TWO)
            with pytest.raises(DownloadStopped):
                await anext(waiting)
            (removal,) = await pulls.delete(ONE)
            assert removal.freed > 0
            with pytest.raises(DownloadStopped):
                await some_bytes(running)

    asyncio.run(work())
    assert not [path for path in settings.hub_cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_stored_model_is_deleted(settings: Settings) -> None:
    async def work() -> None:
        pulls = Pulls(settings)
        await follow(pulls, ONE)
        (removal,) = await pulls.delete(ONE)
        assert removal.freed == SIZE

    asyncio.run(work())
    assert not is_stored(settings, ONE)


@pytest.mark.parametrize("name", [__file__, "/etc/passwd", "http://127.0.0.1:1/x.gguf", "ollama:x", "..", ""])
def test_no_path_and_no_address_is_a_name(settings: Settings, name: str) -> None:
    with pytest.raises(ModelNotFound, match="no model is called"):
        asyncio.run(follow(Pulls(settings), name))


def test_what_goes_wrong_is_raised_for_all_who_follow(tmp_path: Path) -> None:
    async def work() -> list[object]:
        pulls = Pulls(settings_in(tmp_path, offline=True))
        return await asyncio.gather(*(follow(pulls, ONE) for _ in range(2)), return_exceptions=True)

    assert [type(outcome) for outcome in asyncio.run(work())] == [Offline, Offline]


def test_the_end_of_all_stops_them(hub: FakeHub, settings: Settings) -> None:
    hub.pace = 0.005

    async def work() -> None:
        pulls = Pulls(settings)
        running, waiting = (asyncio.create_task(follow(pulls, name)) for name in (ONE, TWO))
        while not any(progress.done for progress in pulls.now()):
            await asyncio.sleep(0.001)
        await pulls.close()
        outcomes = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [DownloadStopped, DownloadStopped]

    asyncio.run(work())
    assert hub.sent < 2 * SIZE
