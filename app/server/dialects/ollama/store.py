"""Downloads and deletes models through Ollama's API. Creating, copying, and pushing models is refused."""

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
from app.server.dialects.ollama.requests import DeleteRequest, PullRequest
from app.server.http.endpoint import LINES, Endpoint
from app.server.http.errors import InvalidRequest
from app.server.http.reply import StreamedReply, WholeReply
from app.server.http.request_body import read_body
from app.server.refusals import AnyRequest, Refusal
from app.server.served_models import ServedModels


class ModelPulls(Protocol):
    """The part of `app.models.pulls.Pulls` that this module uses."""

    def pull(self, name: str) -> AsyncGenerator[PullProgress]: ...

    async def delete(self, name: str) -> list[Removal]: ...


class Progress(Struct, kw_only=True):
    """Progress of a download."""

    status: str
    digest: str | UnsetType = UNSET  # clients show one progress bar for each digest
    total: int | UnsetType = UNSET  # bytes
    completed: int | UnsetType = UNSET


NO_MODEL_CREATION = Refusal(
    "Refused: this server does not create, copy, or push models",
    "This server does not create, copy, or push models",
    "Serve another model with ingle serve --model NAME, or add a name with model_aliases in config.toml.",
)
NO_DOWNLOADS = Refusal(
    "Refused: this server does not download or delete models",
    "This server does not download or delete models",
    "Use ingle pull and ingle rm.",
)
REFUSED_ROUTES: Mapping[str, type[Struct]] = dict.fromkeys(("/api/create", "/api/copy", "/api/push"), AnyRequest)


class StoreEndpoints:
    """Endpoints that manage stored models. A loaded model cannot be deleted."""

    def __init__(self, models: ServedModels, pulls: ModelPulls | None) -> None:
        self._models = models
        self._pulls = pulls

    def endpoints(self) -> list[Endpoint]:
        refused = NO_MODEL_CREATION.endpoints(REFUSED_ROUTES, ERRORS)
        if self._pulls is None:
            return [*refused, *NO_DOWNLOADS.endpoints({"/api/pull": PullRequest}, ERRORS)]
        endpoint, removed = partial(Endpoint, errors=ERRORS), "Delete a stored model"
        pulled = partial(endpoint, takes=PullRequest, gives=Progress, streams=Progress, framing=LINES)
        return [
            *refused,
            pulled("POST", "/api/pull", partial(self.pull, self._pulls), "Download a model"),
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
        chunks = _pull_chunks(pulls, body.required_name())
        return WholeReply(chunks, _fold) if body.stream is False else StreamedReply(chunks, error_body, LINES)

    async def delete(self, pulls: ModelPulls, request: Request) -> Response:
        body = await read_body(request, DELETE)
        name = body.required_name()
        if await self._models.is_loaded(name):
            problem, remedy = f"model: {name} is loaded", f"Unload it first: ingle unload {name}."
            raise InvalidRequest(problem, remedy, parameter="model", status=409)
        await pulls.delete(name)
        return Response()


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
    """Return the last chunk."""
    return [chunk async for chunk in chunks][-1]
