"""The status of the engine: its address, loading progress, and requests, which can be aborted."""

import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from app.chat_backend.converters import sampling_of
from app.chat_backend.engine.connection import EngineConnection
from app.chat_backend.replies import ChatReplies
from app.errors import AppError
from app.process.engine_lease import CHAT_CLIENT
from tui.engine_types import Amount, EngineRequest, EngineStatus, Loading, ModelMemory, Phase, RequestId
from tui.figures import share
from tui.types import Sampling

if TYPE_CHECKING:
    from app.chat_backend.endpoint import ChatEndpoint
    from app.client.own_server import ServerModel, ServerModels


class ChatEngine:
    """Implements `tui.client.Engine`."""

    def __init__(self, connection: EngineConnection, replies: ChatReplies) -> None:
        self._connection = connection
        self._replies = replies
        self._reply_ids: dict[RequestId, str] = {}  # ids of the replies that belong to the requests of the last status

    def address(self) -> str:
        return self._connection.address

    def default_sampling(self) -> Sampling | None:
        recommended = self._connection.default_sampling
        return None if recommended is None else sampling_of(recommended)

    def loading(self, *, retry: bool = False) -> AsyncGenerator[Loading, None]:
        return self._connection.loading(retry=retry)

    async def is_ready(self) -> bool:
        return await self._connection.is_ready()

    async def is_started_elsewhere(self) -> bool:
        return await self._connection.is_started_elsewhere()

    def loaded_models(self) -> AsyncGenerator[Loading, None]:
        return self._connection.loaded_models()

    async def status(self) -> EngineStatus:
        """Return the engine's status. For servers other than Inglenook, only the model is set."""
        from app.client.http import parsing_response

        async with self._connection.use() as engine:
            if not engine.endpoint.is_inglenook:
                return EngineStatus(engine.model, (), (), (), 0, 0, is_reported=False)
            report = await engine.report()
            with parsing_response():
                self._reply_ids = {RequestId(str(one["id"])): str(one.get("reply", "")) for one in report["requests"]}
                return _status(report, await _models(engine.endpoint))

    async def abort(self, request: RequestId) -> None:
        """Abort a request. If it belongs to a reply of this chat, stop the reply as the user does."""
        if await self._replies.stop_by_id(self._reply_ids.get(request, "")):
            return
        async with self._connection.use() as engine:
            await engine.endpoint.call_inglenook("POST", "abort", {"id": request})


async def _models(endpoint: "ChatEndpoint") -> "ServerModels":
    """Return the models of an ingle server; none if it is of an earlier version."""
    from app.client.own_server import ServerModels

    with suppress(AppError):
        return msgspec.convert(await endpoint.call_inglenook("GET", "models"), ServerModels)
    return ServerModels([])


def _status(report: Mapping[str, Any], served: "ServerModels") -> EngineStatus:
    own = f"{CHAT_CLIENT}/{os.getpid()}"
    requests = [_request(one, own) for one in report["requests"]]
    memory = int(report["memory"])
    generated = int(report["generated_tokens"])
    return EngineStatus(
        model=str(report["model"]),
        requests=tuple(sorted(requests, key=lambda one: one.phase in (Phase.WAITING, Phase.PREEMPTED))),
        tiers=(*_tiers(report), *_amount("disk", report["disk"])),
        memory=(*([Amount("process", memory, 0)] if memory else []), *_amount("GPU", report["gpu"])),
        prompt_tokens=max(0, int(report["computed_tokens"]) - generated),
        reply_tokens=generated,
        models=tuple(_model_memory(model) for model in served.models if model.is_in_use),
        free=sum(memory.free for memory in served.memory.values()),
    )


def _model_memory(model: "ServerModel") -> ModelMemory:
    done = "" if model.progress is None else f" {share(model.progress)}"
    memory = model.memory.values()
    return ModelMemory(
        model.name,
        f"{model.state}{done}",
        weights=sum(one.weights for one in memory),
        cache_used=sum(one.touched for one in memory),
        cache_total=sum(one.cache + one.host_pool for one in memory),
    )


def _tiers(report: Mapping[str, Any]) -> Iterator[Amount]:
    """Yield the usage of each KV cache tier in bytes, or in blocks if the block size is unknown."""
    size = int(report["block_bytes"]) or 1
    for tier in report["tiers"]:
        if tier["total"]:
            yield Amount(str(tier["name"]), size * int(tier["used"]), size * int(tier["total"]))


def _amount(name: str, report: Mapping[str, Any] | None) -> Iterator[Amount]:
    if report is not None:
        yield Amount(name, int(report["used"]), int(report["total"]))


def _request(report: Mapping[str, Any], own: str) -> EngineRequest:
    return EngineRequest(
        id=RequestId(str(report["id"])),
        client=str(report["client"]),
        priority=str(report["service_class"]),
        phase=Phase(report["phase"]),
        prompt_done=int(report["prompt_done"]),
        prompt_total=int(report["prompt_total"]),
        reply_tokens=int(report["reply_tokens"]),
        seconds=float(report["seconds"]),
        mine=report["client"] == own,
    )
