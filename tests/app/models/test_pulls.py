"""Pulls with several followers: their order, followers that leave, stopping, and deletion."""

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


@pytest.fixture(autouse=True)
def _each_piece_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish an event for each piece, so that a download has events with bytes before its last one."""
    monkeypatch.setattr("app.models.pulls._EVENT_SECONDS", 0.0)


@pytest.fixture
def settings(hub: FakeHub, tmp_path: Path) -> Settings:
    return settings_in(tmp_path, hub_endpoint=hub.address)


async def follow(pulls: Pulls, name: str) -> list[PullProgress]:
    return [progress async for progress in pulls.pull(name)]


async def some_bytes(events: AsyncGenerator[PullProgress]) -> PullProgress:
    """Wait for the first event of a pull that has received bytes, and return it."""
    async for progress in events:
        if progress.done:
            return progress
    raise AssertionError("the pull ended before it received any bytes")


def is_stored(settings: Settings, name: str) -> bool:
    return ModelStore(settings).hub_models.find(RepositoryName(name)) is not None


def test_pull_reports_progress_and_the_stored_model(settings: Settings) -> None:
    events = asyncio.run(follow(Pulls(settings), ONE))
    assert [events[0].state, events[-1].state] == [PullState.WAITING, PullState.DONE]
    assert {progress.name for progress in events} == {ONE}
    assert any(progress.total == SIZE and progress.label.startswith("Downloading") for progress in events)
    stored = events[-1].stored
    assert stored
    assert stored.path.read_bytes() == b"1" * SIZE


def test_followers_share_one_download(hub: FakeHub, settings: Settings) -> None:
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


def test_pull_stops_with_its_last_follower_and_resumes(hub: FakeHub, settings: Settings) -> None:
    hub.pace = 0.05

    async def work() -> None:
        pulls = Pulls(settings)
        async with aclosing(pulls.pull(ONE)) as events:
            await some_bytes(events)
        while pulls.now():
            await asyncio.sleep(0.001)
        hub.pace = 0.0
        assert await follow(pulls, ONE)

    asyncio.run(work())
    assert is_stored(settings, ONE)
    (rest,) = hub.ranges_asked_for()
    assert 0 < int(rest.removeprefix("bytes=").rstrip("-")) < SIZE
    assert hub.sent < 1.5 * SIZE


def test_pulls_run_in_the_order_of_requests(hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulls run in this order however long the lookup of the first model takes."""
    hub.pace = 0.02
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
            await follow(pulls, ONE)  # a pull of a stored model does not wait
        await second
        assert pulls.now() == []

    asyncio.run(work())
    assert is_stored(settings, TWO)


def test_waiting_and_running_pulls_can_be_deleted(hub: FakeHub, settings: Settings) -> None:
    hub.pace = 0.05

    async def work() -> None:
        pulls = Pulls(settings)
        waiting = pulls.pull(TWO)
        async with aclosing(pulls.pull(ONE)) as running, aclosing(waiting):
            await some_bytes(running)
            await anext(waiting)
            with pytest.raises(ModelNotFound):  # no part of this model is stored
                await pulls.delete(TWO)
            with pytest.raises(DownloadStopped):
                await anext(waiting)
            (removal,) = await pulls.delete(ONE)
            assert removal.freed > 0
            with pytest.raises(DownloadStopped):
                await some_bytes(running)

    asyncio.run(work())
    assert not [path for path in settings.hub_cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_stored_model_is_deleted(settings: Settings) -> None:
    async def work() -> None:
        pulls = Pulls(settings)
        await follow(pulls, ONE)
        (removal,) = await pulls.delete(ONE)
        assert removal.freed == SIZE

    asyncio.run(work())
    assert not is_stored(settings, ONE)


@pytest.mark.parametrize("name", [__file__, "/etc/passwd", "http://127.0.0.1:1/x.gguf", "ollama:x", "..", ""])
def test_paths_and_addresses_are_refused(settings: Settings, name: str) -> None:
    with pytest.raises(ModelNotFound, match="no model is called"):
        asyncio.run(follow(Pulls(settings), name))


def test_error_is_raised_for_all_followers(tmp_path: Path) -> None:
    async def work() -> list[object]:
        pulls = Pulls(settings_in(tmp_path, offline=True))
        return await asyncio.gather(*(follow(pulls, ONE) for _ in range(2)), return_exceptions=True)

    assert [type(outcome) for outcome in asyncio.run(work())] == [Offline, Offline]


def test_close_stops_all_pulls(hub: FakeHub, settings: Settings) -> None:
    hub.pace = 0.05

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
