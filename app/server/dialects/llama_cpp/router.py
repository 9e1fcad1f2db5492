"""Loading and unloading of models, as the router of llama.cpp's server offers it, and the events about their states.

Its list of models is in `app.server.dialects.openai.models`.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Literal, NamedTuple, Self

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app.models.residency.resident import Resident
from app.server.dialects.llama_cpp.errors import ERRORS, error_body
from app.server.dialects.llama_cpp.fields import LOAD, UNLOAD
from app.server.dialects.llama_cpp.requests import RoutedModel
from app.server.dialects.openai.models import RouterState, router_state
from app.server.http.endpoint import BARE_EVENTS, Endpoint
from app.server.http.errors import InvalidRequest
from app.server.http.reply import StreamedReply, json_reply
from app.server.http.request_body import read_body
from app.server.served_models import LoadedModel, ServedModels
from quant.errors import InglenookError

POLL_SECONDS = 0.1  # seconds between two looks at the states of the models, while clients follow them
STAGE = "text_model"  # llama.cpp's name for the weights; it has further stages for the models that it loads with them


class Success(Struct):
    success: bool = True


class Progress(Struct):
    """Progress of a load."""

    value: float  # share of the current stage that is done, from 0 to 1
    stages: tuple[str, ...] = (STAGE,)
    current: str = STAGE


class Status(Struct):
    status: RouterState
    progress: Progress | UnsetType = UNSET
    exit_code: int | UnsetType = UNSET  # set if the model is not loaded: 1 if its load failed, else 0


class ModelEvent(Struct):
    """A change of the state of a model, or progress of its load."""

    model: str
    data: Status
    event: Literal["model_status"] = "model_status"


class _Seen(NamedTuple):
    """The parts of the state of a model that events report."""

    state: RouterState
    fraction: float = 0.0
    failed: bool = False

    @classmethod
    def of(cls, model: Resident[LoadedModel]) -> Self:
        fraction = 0.0 if model.task is None else model.task.fraction
        return cls(router_state(model), fraction, model.problem is not None)


class RouterEndpoints:
    """Endpoints that load and unload models, and report their states."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._loads: dict[str, asyncio.Task[None]] = {}  # loads that clients started, by the keys of the models

    def endpoints(self) -> list[Endpoint]:
        endpoint = partial(Endpoint, errors=ERRORS)
        loaded, freed, followed = "Start to load a model", "Unload a model", "Report changes of the states of models"
        return [
            endpoint("POST", "/models/load", self.load, loaded, takes=RoutedModel, gives=Success),
            endpoint("POST", "/models/unload", self.unload, freed, takes=RoutedModel, gives=Success),
            endpoint(
                "GET", "/models/sse", self.follow, followed, gives=ModelEvent, streams=ModelEvent, framing=BARE_EVENTS
            ),
        ]

    async def load(self, request: Request) -> Response:
        """Start a load. Its end is an event, and an error is in the list of models."""
        key, name = await self._find((await read_body(request, LOAD)).model)
        if router_state(self._models.residents.of(key)) != "unloaded":
            raise InvalidRequest(f"model: {name} is already loaded or loading", parameter="model")
        self._loads[key] = asyncio.create_task(self._load(key))
        return json_reply(Success())

    async def _load(self, key: str) -> None:
        try:
            with contextlib.suppress(InglenookError):  # the state of the model has the error
                await self._models.residents.load(key)
        finally:
            if self._loads.get(key) is asyncio.current_task():
                del self._loads[key]

    async def unload(self, request: Request) -> Response:
        """Unload a model, or stop its load unless other requests wait for it."""
        key, name = await self._find((await read_body(request, UNLOAD)).model)
        if (loading := self._loads.pop(key, None)) is not None:
            loading.cancel()
            await asyncio.wait((loading,))
        if not await self._models.residents.unload(key) and loading is None:
            raise InvalidRequest(f"model: {name} is not loaded", parameter="model")
        return json_reply(Success())

    async def _find(self, name: str) -> tuple[str, str]:
        found = await self._models.names.find(name)
        return found.key, found.reply_name

    async def follow(self, request: Request) -> StreamedReply[ModelEvent]:
        return StreamedReply(self._events(), error_body, BARE_EVENTS)

    async def _events(self) -> AsyncGenerator[list[ModelEvent]]:
        """Yield an event for each name of a model whose state changes, until the client leaves or the server stops."""
        last: Mapping[str, _Seen] = {key: it for key, it in self._seen().items() if it.state != "loading"}
        yield []  # sends the head
        while not self._models.residents.is_closed:
            seen = self._seen()
            changed = {key: now for key, now in seen.items() if now != last.get(key, _Seen("unloaded"))}
            if changed:
                listed = await self._models.names.listed()
                yield [_event(name, now) for key, now in changed.items() for name in listed.get(key, ())]
            last = seen
            await asyncio.sleep(POLL_SECONDS)

    def _seen(self) -> Mapping[str, _Seen]:
        return {model.name: _Seen.of(model) for model in self._models.residents}


def _event(name: str, seen: _Seen) -> ModelEvent:
    status = Status(seen.state)
    if seen.state == "loading":
        status.progress = Progress(seen.fraction)
    elif seen.state == "unloaded":
        status.exit_code = int(seen.failed)
    return ModelEvent(name, status)
