"""The HTTP application: every route, what each error looks like, and the door in front. Knows no ASGI server."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from app.chat.service import ChatService
from app.chat.token_streams import TokenStreams
from app.embedding_service import EmbeddingService
from app.server.door import LOOPBACK_NAMES, Door
from app.server.errors import InvalidRequest
from app.server.metrics import Metrics
from app.server.openai_embeddings import EmbeddingEndpoints
from app.server.openai_endpoints import OpenAIEndpoints
from app.server.openai_errors import error_response
from app.server.origin import CLASS_NAMES
from engine.request import ServiceClass
from quant.errors import InglenookError

NO_ALIASES: Mapping[str, str] = MappingProxyType({})


class Health(Struct, omit_defaults=True):
    status: Literal["ok", "unavailable"]
    running: int
    waiting: int
    running_by_class: dict[str, int]
    waiting_by_class: dict[str, int]
    kv_blocks: int
    kv_blocks_held: int  # by requests
    reason: str = ""  # why it is unavailable


def create_application(
    service: ChatService, *, host_names: Collection[str] = (), aliases: Mapping[str, str] = NO_ALIASES
) -> Starlette:
    """The endpoint over a service whose streams are started. `host_names` are further names, without port, that
    requests may call this server by; an IPv6 address is in brackets. `aliases` are other names of models, by which
    requests may call them: see `ServedModel`."""

    async def health(request: Request) -> Response:
        return _health(service.streams)

    routes = [
        *OpenAIEndpoints(service, aliases).routes(),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", Metrics(service).scrape, methods=["GET"]),
    ]
    return _application(routes, host_names)


def create_embedding_application(
    service: EmbeddingService, *, host_names: Collection[str] = (), aliases: Mapping[str, str] = NO_ALIASES
) -> Starlette:
    """The endpoint over a model that gives embeddings; `host_names` and `aliases` as above."""

    async def health(request: Request) -> Response:
        return _embedding_health(service)

    routes = [*EmbeddingEndpoints(service, aliases).routes(), Route("/health", health, methods=["GET"])]
    return _application(routes, host_names)


def _application(routes: Sequence[Route], host_names: Collection[str]) -> Starlette:
    application = Starlette(
        routes=routes,
        middleware=[Middleware(Door, names=(*LOOPBACK_NAMES, *host_names))],
        exception_handlers={
            InglenookError: _failed,
            HTTPException: _unroutable,
            ClientDisconnect: _disconnected,
            Exception: _failed,
        },
    )
    application.router.redirect_slashes = False
    return application


def _health(streams: TokenStreams) -> Response:
    """From the heartbeat of the engine's step loop; nothing here waits for the engine."""
    problem, state, running = streams.problem(), streams.state(), streams.running_by_class()
    body = Health(
        status="unavailable" if problem else "ok",
        running=state.running,
        waiting=sum(state.waiting),
        running_by_class={name: running[service] for name, service in CLASS_NAMES.items()},
        waiting_by_class={name: state.waiting_in(service) for name, service in CLASS_NAMES.items()},
        kv_blocks=state.kv_blocks,
        kv_blocks_held=state.kv_blocks_held,
        reason=problem,
    )
    return Response(msgspec.json.encode(body), 503 if problem else 200, media_type="application/json")


def _embedding_health(service: EmbeddingService) -> Response:
    """In the same shape: all requests are of one class, none has to wait for a place, and there is no cache."""
    none = dict.fromkeys(CLASS_NAMES, 0)
    running = {**none, ServiceClass.NORMAL.name.lower(): service.requests}
    body = Health("ok", service.requests, 0, running, none, kv_blocks=0, kv_blocks_held=0)
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _unroutable(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (500, None)
    message = f"{request.method} {request.scope['path']}: {_UNROUTABLE.get(status, 'this cannot be answered')}"
    return error_response(InvalidRequest(message, status=status), headers)


_UNROUTABLE = {404: "there is no such path", 405: "this path does not take this method"}


async def _disconnected(request: Request, error: Exception) -> Response:
    """Nobody is there to read it."""
    return Response(status_code=499)
