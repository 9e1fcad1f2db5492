"""The HTTP application: all routes, the format of errors, and the middleware around them. It runs under any ASGI
server.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.generation.service import ChatService
from app.generation.token_streams import TokenStreams
from app.server.box_routing import BoxRouting
from app.server.boxes import Boxes
from app.server.dialects.anthropic.endpoints import AnthropicEndpoints
from app.server.dialects.llama_cpp.embeddings import LlamaCppEmbeddingEndpoints
from app.server.dialects.llama_cpp.endpoints import LlamaCppEndpoints
from app.server.dialects.lm_studio.endpoints import LMStudioEndpoints
from app.server.dialects.ollama.embeddings import OllamaEmbeddingEndpoints
from app.server.dialects.ollama.endpoints import OllamaEndpoints
from app.server.dialects.ollama.store import ModelPulls, StoreEndpoints
from app.server.dialects.openai.embeddings import EmbeddingEndpoints
from app.server.dialects.openai.endpoints import OpenAIEndpoints
from app.server.dialects.openai.errors import ERRORS as OPENAI_ERRORS
from app.server.dialects.responses.endpoints import ResponseEndpoints
from app.server.dialects.responses.stored_responses import StoredResponses
from app.server.http.access import HEALTH_PATHS, Authenticator, RequestLimits
from app.server.http.access_middleware import LOOPBACK_NAMES, AccessMiddleware, AllowedOrigins
from app.server.http.connection import CancelOnDisconnect
from app.server.http.endpoint import TEXT, Endpoint
from app.server.http.errors import ErrorFormats, InvalidRequest, UnhandledErrors, error_response
from app.server.http.holds import RequestHolds
from app.server.http.openapi import OpenAPI
from app.server.http.seen import SeenRequests
from app.server.machine import Machine
from app.server.metrics import Metrics
from app.server.model_endpoints import OwnModelEndpoints
from app.server.origin import CLASS_NAMES, caller_of
from app.server.own_endpoints import OwnEndpoints
from app.server.page.endpoints import PageEndpoints
from app.server.served_models import ServedModels
from engine.freed_memory import return_freed_memory, trim
from engine.request import ServiceClass
from quant.errors import InglenookError

LARGE_REQUEST_BYTES = 1 << 20  # bytes of a request's body and its reply together
# seconds from a large request to the trim, so that more requests and the work for disconnected clients can end first
TRIM_DELAY_SECONDS = 1.0
TRIM_PERIOD_SECONDS = 60.0  # between trims while there are other requests

Status: TypeAlias = Literal["ok", "unavailable"]


class HealthStatus(Struct):
    status: Status


class Health(Struct, omit_defaults=True):
    status: Status
    running: int
    waiting: int
    running_by_class: dict[str, int]
    waiting_by_class: dict[str, int]
    kv_blocks: int
    kv_blocks_held: int  # blocks that requests hold
    reason: str = ""  # why the server is unavailable


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The rules by which the server accepts or refuses requests."""

    authenticator: Authenticator = field(default_factory=Authenticator)
    # names in the Host header that are accepted in addition to the server's addresses; IPv6 in brackets
    host_names: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()  # origins of web pages
    max_requests: int = 0  # limit of the concurrent requests of one caller; 0: no limit


DEFAULT_POLICY = AccessPolicy()


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Objects and options that an application needs besides its models."""

    policy: AccessPolicy = DEFAULT_POLICY
    pulls: ModelPulls | None = None  # downloads models; None: requests to download are refused
    state_dir: Path | None = None  # folder of stored responses; None: in memory
    boxes: Boxes | None = None  # the user's other machines; None: there are none
    machine: Machine = field(default_factory=Machine)  # disk and GPU memory that the server reports
    keep_changing_lines: bool = False  # whether prompts keep lines that change with every request


DEFAULT_CONTEXT = ServerContext()


def create_application(models: ServedModels, context: ServerContext = DEFAULT_CONTEXT) -> Starlette:
    """Return the application that serves these models."""
    openai, embeddings = OpenAIEndpoints(models), EmbeddingEndpoints(models)
    responses = ResponseEndpoints(models, StoredResponses(context.state_dir))
    endpoints = [
        *LlamaCppEndpoints(models).endpoints(),  # before OpenAI's path /models/{model}
        *openai.endpoints(),
        *embeddings.endpoints(),
        *responses.endpoints(),
        *OllamaEndpoints(models).endpoints(),
        *OllamaEmbeddingEndpoints(models).endpoints(),
        *StoreEndpoints(models, context.pulls).endpoints(),
        *LMStudioEndpoints(models, openai, embeddings, responses).endpoints(),
        *LlamaCppEmbeddingEndpoints(models).endpoints(),
        *OwnEndpoints(models, context.machine).endpoints(),
        *OwnModelEndpoints(models).endpoints(),
        *PageEndpoints(models).endpoints(),
        *AnthropicEndpoints(models, keep_changing_lines=context.keep_changing_lines).endpoints(),
        *_health_endpoints(models),
        Endpoint("GET", "/metrics", Metrics(models).scrape, "Return the metrics in Prometheus' format", gives=TEXT),
    ]
    return _application(endpoints, models, context)


def _application(endpoints: Sequence[Endpoint], models: ServedModels, context: ServerContext) -> Starlette:
    seen, policy = SeenRequests(), context.policy
    endpoints = [*endpoints, seen.endpoint]
    access = Middleware(
        AccessMiddleware,
        authenticator=policy.authenticator,
        limits=RequestLimits(policy.max_requests),
        names=(*LOOPBACK_NAMES, *policy.host_names),
        origins=AllowedOrigins(policy.allowed_origins),
    )
    application = Starlette(
        routes=[*endpoints, OpenAPI(endpoints, models.names.given_names, OPENAI_ERRORS).endpoint],
        middleware=[
            Middleware(MemoryTrim),
            Middleware(CancelOnDisconnect),
            Middleware(seen.middleware),
            Middleware(ErrorFormats, endpoints=endpoints, default=OPENAI_ERRORS),
            Middleware(RequestHolds),
            Middleware(UnhandledErrors),
            access,
            Middleware(BoxRouting, boxes=context.boxes, names=models.names),
        ],
        exception_handlers={
            InglenookError: _error_response,
            HTTPException: _routing_error,
            ClientDisconnect: _client_closed_request,
        },
    )
    application.router.redirect_slashes = False
    return application


class MemoryTrim:
    """ASGI middleware around all others: returns freed memory to the system after large requests, and once a minute
    while there are requests.

    By itself, the C library returns only what is free at the end of a pool, not between objects that live longer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._due: set[Callable[[], None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def counted_receive() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            nonlocal size
            size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            if scope["type"] != "lifespan":
                self._plan(trim, TRIM_PERIOD_SECONDS)
            if size >= LARGE_REQUEST_BYTES:
                self._plan(return_freed_memory, TRIM_DELAY_SECONDS)

    def _plan(self, work: Callable[[], None], seconds: float) -> None:
        """Do `work` after some seconds, unless that is already planned."""
        if work not in self._due:
            self._due.add(work)
            asyncio.get_running_loop().call_later(seconds, self._start, work)

    def _start(self, work: Callable[[], None]) -> None:
        self._due.remove(work)
        asyncio.get_running_loop().run_in_executor(None, work)


def _health_endpoints(models: ServedModels) -> list[Endpoint]:
    """Return the routes of the health check. Without a key, the reply says only whether the server works."""

    async def answer(request: Request) -> Response:
        health = _health(models)
        status = 503 if health.status == "unavailable" else 200
        body = health if caller_of(request).is_authenticated else HealthStatus(health.status)
        return Response(msgspec.json.encode(body), status, media_type="application/json")

    summary = "Report the health and the load of the server"
    return [Endpoint("GET", path, answer, summary, gives=Health, fails_with=Health) for path in HEALTH_PATHS]


def _health(models: ServedModels) -> Health:
    """Add up the states of all loaded models, from their heartbeats: nothing here waits for an engine."""
    services = [resident.loaded.service for resident in models.residents if resident.loaded is not None]
    problem = next(filter(None, (service.problem() for service in services)), _start_problem(models))
    none = dict.fromkeys(CLASS_NAMES, 0)
    health = Health("unavailable" if problem else "ok", 0, 0, dict(none), dict(none), 0, 0, reason=problem)
    for service in services:
        if isinstance(service, ChatService):
            _add_chat(health, service.streams)
        else:
            health.running += service.requests
            health.running_by_class[ServiceClass.NORMAL.name.lower()] += service.requests
    return health


def _start_problem(models: ServedModels) -> str:
    """Return why the server cannot serve yet: no model has been loaded since its start. Empty if one has."""
    residents = list(models.residents)
    if any(model.loads or model.loaded is not None for model in residents):
        return ""
    loading = (f"{model.title} is {model.state.value}" for model in residents if model.task is not None)
    return next(loading, "no model is loaded")


def _add_chat(health: Health, streams: TokenStreams) -> None:
    state, running = streams.state(), streams.running_by_class()
    health.running += state.running
    health.waiting += sum(state.waiting)
    health.kv_blocks += state.kv_blocks
    health.kv_blocks_held += state.kv_blocks_held
    for name, service in CLASS_NAMES.items():
        health.running_by_class[name] += running[service]
        health.waiting_by_class[name] += state.waiting_in(service)


async def _error_response(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope)


async def _routing_error(request: Request, error: Exception) -> Response:
    """Return the error for an unknown path, or for a method that the path does not have."""
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (500, None)
    message = f"{request.method} {request.scope['path']}: {_ROUTING_PROBLEMS.get(status, 'this request failed')}"
    return error_response(InvalidRequest(message, status=status, headers=headers), request.scope)


_ROUTING_PROBLEMS = {404: "this path does not exist", 405: "this path does not support this method"}


async def _client_closed_request(request: Request, error: Exception) -> Response:
    """Return a response that no client reads, with nginx's status for a closed connection."""
    return Response(status_code=499)
