"""The models of this machine through Ollama's API: fetched and removed by their names. What Ollama does besides is
refused: no model is made, copied or sent anywhere.
"""

import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app.models.pulls import PullProgress, PullState
from app.models.stored_model import Removal
from app.server.dialects.ollama.errors import ERRORS, error_body
from app.server.dialects.ollama.fields import DELETE, PULL
from app.server.dialects.ollama.requests import DeleteRequest, ModelRequest, PullRequest
from app.server.http.endpoint import LINES, Endpoint
from app.server.http.errors import InvalidRequest
from app.server.http.reply import StreamedReply, WholeReply
from app.server.http.request_body import read_body
from app.server.refusals import AnyRequest, Refusal
from app.server.served_model import ServedModel


class ModelPulls(Protocol):
    """See `app.models.pulls.Pulls`."""

    def pull(self, name: str) -> AsyncGenerator[PullProgress]: ...

    async def delete(self, name: str) -> list[Removal]: ...


class Progress(Struct, kw_only=True):
    """How a pull goes."""

    status: str
    digest: str | UnsetType = UNSET  # clients have a bar for each
    total: int | UnsetType = UNSET  # bytes
    completed: int | UnsetType = UNSET


NO_MODEL_CREATION = Refusal(
    "Refused: this server makes, copies and sends no models",
    "This server makes, copies and sends no models",
    "Serve another one: ingle serve --model NAME; another name for one is a model alias of config.toml.",
)
NO_DOWNLOADS = Refusal(
    "Refused: this server fetches and removes no models",
    "This server fetches and removes no models",
    "Use ingle pull and ingle rm.",
)
REFUSED_ROUTES: Mapping[str, type[Struct]] = dict.fromkeys(("/api/create", "/api/copy", "/api/push"), AnyRequest)


class StoreEndpoints:
    """Beside one model, which is served and stays."""

    def __init__(self, model: ServedModel, pulls: ModelPulls | None) -> None:
        self._model = model
        self._pulls = pulls

    def endpoints(self) -> list[Endpoint]:
        refused = NO_MODEL_CREATION.endpoints(REFUSED_ROUTES, ERRORS)
        if self._pulls is None:
            return [*refused, *NO_DOWNLOADS.endpoints({"/api/pull": PullRequest}, ERRORS)]
        endpoint, removed = partial(Endpoint, errors=ERRORS), "A stored model is removed"
        pulled = partial(endpoint, takes=PullRequest, gives=Progress, streams=Progress, framing=LINES)
        return [
            *refused,
            pulled("POST", "/api/pull", partial(self.pull, self._pulls), "A model is fetched"),
            endpoint(
                "DELETE",
                "/api/delete",
                partial(self.delete, self._pulls),
                removed,
                takes=DeleteRequest,
            ),
        ]

    async def pull(self, pulls: ModelPulls, request: Request) -> StreamedReply[Progress] | WholeReply[Progress]:
        body = await read_body(request, PULL)
        chunks = _pull_chunks(pulls, _required_name(body))
        return WholeReply(chunks, _fold) if body.stream is False else StreamedReply(chunks, error_body, LINES)

    async def delete(self, pulls: ModelPulls, request: Request) -> Response:
        body = await read_body(request, DELETE)
        name = _required_name(body)
        if self._model.has_name(name):
            problem, remedy = f"model: {name} is being served", "End the server first: ingle stop."
            raise InvalidRequest(problem, remedy, parameter="model", status=409)
        await pulls.delete(name)
        return Response()


def _required_name(body: ModelRequest) -> str:
    if not body.model_name:
        raise InvalidRequest("model: it is required", parameter="model")
    return body.model_name


async def _pull_chunks(pulls: ModelPulls, name: str) -> AsyncGenerator[list[Progress]]:
    async with aclosing(pulls.pull(name)) as events:
        async for event in events:
            yield [_progress(event)]


def _progress(event: PullProgress) -> Progress:
    if event.state is PullState.DONE:
        return Progress(status="success")
    if event.total is None:
        return Progress(status=event.label or "pulling manifest")
    bar = hashlib.sha256(f"{event.name} {event.label}".encode()).hexdigest()
    return Progress(status=event.label, digest=f"sha256:{bar}", total=event.total, completed=event.done)


async def _fold(chunks: AsyncGenerator[Progress]) -> Progress:
    """The last of it."""
    return [chunk async for chunk in chunks][-1]
