"""Leases on an engine, held by chats through a lock and by other programs through their requests."""

import asyncio
import os
from pathlib import Path

import pytest

from app.process.engine_lease import CHAT_CLIENT, EngineLeases, count_other_leases, hold_lease
from app.settings.settings import Settings, load_settings
from tests.app.server.live_server import Clock


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(state_dir=tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def nothing(scope: object, receive: object, send: object) -> None:
    pass


def ask(leases: EngineLeases, agent: bytes, method: str = "POST") -> None:
    scope = {"type": "http", "method": method, "headers": [(b"user-agent", agent)]}
    asyncio.run(leases.track_requests(nothing)(scope, nothing, nothing))  # type: ignore[arg-type]


def test_leases_expire_with_the_last_chat(settings: Settings, clock: Clock) -> None:
    leases = EngineLeases(settings, clock)
    assert not leases.is_expired()
    with hold_lease(settings, os.getpid()):
        assert not leases.is_expired()
        assert count_other_leases(settings, os.getpid()) == 0  # the lease of this process does not count
    assert leases.is_expired()


def test_leases_expire_if_no_chat_starts(settings: Settings, clock: Clock) -> None:
    leases = EngineLeases(settings, clock)
    clock.seconds += 61
    assert leases.is_expired()


def test_crashed_chat_keeps_the_engine_for_30_seconds(settings: Settings, clock: Clock) -> None:
    leases = EngineLeases(settings, clock)
    with hold_lease(settings, os.getpid()):
        assert not leases.is_expired()
    mark = settings.state_dir / "attendance" / str(os.getpid()) / "999999.lock"
    mark.touch()
    assert count_other_leases(settings, os.getpid()) == 0
    assert not leases.is_expired()
    assert not mark.exists()
    clock.seconds += 31
    assert leases.is_expired()


@pytest.mark.parametrize(
    ("agent", "method", "stays"),
    [(b"editor/1", "POST", True), (CHAT_CLIENT.encode() + b"/7", "POST", False), (b"editor/1", "GET", False)],
)
def test_requests_of_other_programs_keep_the_engine(
    settings: Settings, clock: Clock, agent: bytes, method: str, stays: bool
) -> None:
    leases = EngineLeases(settings, clock)
    with hold_lease(settings, os.getpid()):
        assert not leases.is_expired()
        ask(leases, agent, method)
    clock.seconds += 299
    assert leases.is_expired() is not stays
    clock.seconds += 2
    assert leases.is_expired()


@pytest.mark.parametrize("seconds", [0, 7])
def test_keep_alive_setting_limits_the_wait_for_other_programs(tmp_path: Path, clock: Clock, seconds: int) -> None:
    leases = EngineLeases(load_settings(state_dir=tmp_path, keep_alive_s=seconds), clock)
    with hold_lease(load_settings(state_dir=tmp_path), os.getpid()):
        assert not leases.is_expired()
        ask(leases, b"editor/9")
    clock.seconds += max(0.0, seconds - 0.5)
    assert leases.is_expired() == (not seconds)
    clock.seconds += 1
    assert leases.is_expired()
