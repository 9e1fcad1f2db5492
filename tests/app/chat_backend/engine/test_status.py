"""Tests for the engine's status."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.chat_backend.engine.connection import EngineConnection
from app.chat_backend.engine.server import ReadyEngine
from app.chat_backend.engine.status import ChatEngine
from app.chat_backend.replies import ChatReplies
from app.client.http import ServerError
from tui.engine_types import Amount, EngineStatus, ModelMemory
from tui.types import Sampling

REPORT = {
    "model": "m",
    "requests": [],
    "tiers": [{"name": "device", "used": 3, "total": 10}, {"name": "RAM", "used": 0, "total": 0}],
    "block_bytes": 1000,
    "disk": {"used": 70, "total": 800},
    "memory": 5000,
    "gpu": {"used": 20, "total": 90},
    "computed_tokens": 12,
    "generated_tokens": 5,
}


@dataclass
class Told:
    """A fake endpoint that also serves as its own connection."""

    report: dict[str, Any]
    models: dict[str, Any] | None = None
    is_inglenook: bool = True

    async def call_inglenook(self, method: str, path: str) -> dict[str, Any]:
        if path == "models":
            if self.models is None:
                raise ServerError("GET /inglenook/models: this path does not exist")
            return self.models
        assert (method, path) == ("GET", "engine?model=m")
        return self.report

    @asynccontextmanager
    async def use(self) -> AsyncIterator[ReadyEngine]:
        yield ReadyEngine(cast(Any, self), "m", 100)


def status(models: dict[str, Any] | None = None, **changed: object) -> EngineStatus:
    told = Told({**REPORT, **changed}, models)
    return asyncio.run(ChatEngine(cast(EngineConnection, told), cast(ChatReplies, None)).status())


def test_tiers_are_reported_in_bytes() -> None:
    found = status()
    assert found.tiers == (Amount("device", 3000, 10_000), Amount("disk", 70, 800))
    assert found.memory == (Amount("process", 5000, 0), Amount("GPU", 20, 90))
    assert (found.prompt_tokens, found.reply_tokens) == (7, 5)


def test_missing_tiers_are_left_out() -> None:
    found = status(disk=None, gpu=None, memory=0, block_bytes=0)
    assert found.tiers == (Amount("device", 3, 10),)
    assert found.memory == ()


def test_models_of_the_server_are_listed_with_their_memory() -> None:
    memory = {"host": {"weights": 10, "steps": 1, "cache": 40, "host_pool": 0, "touched": 30}}
    models = [
        {"name": "m", "names": ["m"], "kind": "chat", "state": "loaded", "memory": memory},
        {"name": "n", "names": ["n"], "kind": "chat", "state": "loading", "stage": "Loading n", "progress": 0.5},
        {"name": "o", "names": ["o"], "kind": "chat", "state": "unloaded"},
    ]
    found = status({"models": models, "memory": {"host": {"available": 90, "free": 60, "promised": 51}}})
    assert found.models == (ModelMemory("m", "loaded", 10, 30, 40), ModelMemory("n", "loading 50 %"))
    assert found.free == 60
    assert status().models == ()


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (
            {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1},
            Sampling(temperature=0.6, top_k=20, repetition_penalty=1.1),
        ),
        ({}, Sampling()),
        (None, None),
    ],
)
def test_default_sampling_has_the_values_of_the_settings(
    reported: dict[str, float] | None, expected: Sampling | None
) -> None:
    connection = cast(EngineConnection, SimpleNamespace(default_sampling=reported))
    assert ChatEngine(connection, cast(ChatReplies, None)).default_sampling() == expected
