"""The HTTP application: all routes, the format of errors, and the middleware around them. It runs under any ASGI
server.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
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

from app.generation.embedding_service import EmbeddingService
from app.generation.service import ChatService
from app.models.details import ModelDetails
from app.server.dialects.anthropic.endpoints import MESSAGE_ROUTES, AnthropicEndpoints
from app.server.dialects.anthropic.errors import ERRORS as MESSAGE_ERRORS
from app.server.dialects.llama_cpp.embeddings import LlamaCppEmbeddingEndpoints
from app.server.dialects.llama_cpp.endpoints import LlamaCppEndpoints
from app.server.dialects.lm_studio import endpoints as lm_studio
from app.server.dialects.lm_studio.endpoints import LMStudioEndpoints
from app.server.dialects.ollama.embeddings import OllamaEmbeddingEndpoints
from app.server.dialects.ollama.endpoints import OllamaEndpoints
from app.server.dialects.ollama.store import ModelPulls, StoreEndpoints
from app.server.dialects.openai.embeddings import EmbeddingEndpoints
from app.server.dialects.openai.endpoints import OpenAIEndpoints
from app.server.dialects.openai.errors import ERRORS as OPENAI_ERRORS
from app.server.dialects.responses.endpoints import RESPONSE_ROUTES, ResponseEndpoints
from app.server.dialects.responses.stored_responses import StoredResponses
from app.server.http.access import HEALTH_PATHS, Authenticator, RequestLimits
from app.server.http.access_middleware import LOOPBACK_NAMES, AccessMiddleware, AllowedOrigins
from app.server.http.connection import CancelOnDisconnect
from app.server.http.endpoint import TEXT, Endpoint
from app.server.http.errors import ErrorFormats, InvalidRequest, UnhandledErrors, error_response
from app.server.http.openapi import OpenAPI
from app.server.machine import Machine
from app.server.metrics import Metrics
from app.server.origin import CLASS_NAMES, caller_of
from app.server.own_endpoints import OwnEndpoints
from app.server.refusals import NO_TEXT
from app.server.served_model import ServedModel
from engine.freed_memory import return_freed_memory
from engine.request import ServiceClass
from quant.errors import InglenookError

LARGE_REQUEST_BYTES = 1 << 20  # bytes of a request's body and its reply together
# seconds before the trim, so that more requests and the work for disconnected clients can end first
TRIM_DELAY_SECONDS = 1.0

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
    """Objects and options that an application needs besides its model."""

    policy: AccessPolicy = DEFAULT_POLICY
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of models; see `ServedModel`
    describe: Callable[[], ModelDetails] | None = None  # reads details from the model's files; see `ServedModel`
    pulls: ModelPulls | None = None  # downloads models; None: requests to download are refused
    state_dir: Path | None = None  # folder of stored responses; None: in memory
    machine: Machine = field(default_factory=Machine)  # disk and GPU memory that the server reports
    keep_changing_lines: bool = False  # whether prompts keep lines that change with every request
    other_names: Sequence[str] = ()  # further names of the served model
    loaded_as: str = ""  # name under which the model was loaded; empty: the service's name


DEFAULT_CONTEXT = ServerContext()


def create_application(service: ChatService, context: ServerContext = DEFAULT_CONTEXT) -> Starlette:
    """Return the application of a chat service whose token streams are running."""
    model = _served_model(service, context)
    openai = OpenAIEndpoints(service, model)
    responses = ResponseEndpoints(service, model, StoredResponses(context.state_dir))
    endpoints = [
        *openai.endpoints(),
        *responses.endpoints(),
        *OllamaEndpoints(service, model).endpoints(),
        *StoreEndpoints(model, context.pulls).endpoints(),
        *LMStudioEndpoints(service, model, openai, responses).endpoints(),
        *LlamaCppEndpoints(service, model).endpoints(),
        *OwnEndpoints(service, context.machine).endpoints(),
        *AnthropicEndpoints(service, model, keep_changing_lines=context.keep_changing_lines).endpoints(),
        *_health_endpoints(lambda: _health(service)),
        Endpoint("GET", "/metrics", Metrics(service).scrape, "Return the metrics in Prometheus' format", gives=TEXT),
    ]
    return _application(endpoints, model, context.policy)


def create_embedding_application(service: EmbeddingService, context: ServerContext = DEFAULT_CONTEXT) -> Starlette:
    """Return the application of a model that returns vectors or ranks documents."""
    model = _served_model(service, context)
    openai = EmbeddingEndpoints(service, model)
    endpoints = [
        *openai.endpoints(),
        *OllamaEmbeddingEndpoints(service, model).endpoints(),
        *StoreEndpoints(model, context.pulls).endpoints(),
        *lm_studio.embedding_endpoints(model, openai, ranks=service.ranks),
        *LlamaCppEmbeddingEndpoints(service, model).endpoints(),
        *NO_TEXT.endpoints(MESSAGE_ROUTES, MESSAGE_ERRORS),
        *NO_TEXT.endpoints(RESPONSE_ROUTES),
        *_health_endpoints(lambda: _embedding_health(service)),
    ]
    return _application(endpoints, model, context.policy)


def _served_model(service: ChatService | EmbeddingService, context: ServerContext) -> ServedModel:
    return ServedModel(
        service.name,
        service.context_length,
        service.vocab_size,
        context.aliases,
        context.describe,
        other_names=context.other_names,
        loaded_as=context.loaded_as,
    )


def _application(endpoints: Sequence[Endpoint], model: ServedModel, policy: AccessPolicy) -> Starlette:
    access = Middleware(
        AccessMiddleware,
        authenticator=policy.authenticator,
        limits=RequestLimits(policy.max_requests),
        names=(*LOOPBACK_NAMES, *policy.host_names),
        origins=AllowedOrigins(policy.allowed_origins),
    )
    application = Starlette(
        routes=[*endpoints, OpenAPI(endpoints, model.names, OPENAI_ERRORS).endpoint],
        middleware=[
            Middleware(MemoryTrim),
            Middleware(CancelOnDisconnect),
            Middleware(ErrorFormats, endpoints=endpoints, default=OPENAI_ERRORS),
            Middleware(UnhandledErrors),
            access,
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
    """ASGI middleware around all others: returns freed memory to the system after large requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_due = False

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
            if size >= LARGE_REQUEST_BYTES and not self._is_due:
                self._is_due = True
                asyncio.get_running_loop().call_later(TRIM_DELAY_SECONDS, self._trim)

    def _trim(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)


def _health_endpoints(health: Callable[[], Health]) -> list[Endpoint]:
    """Return the routes of the health check. Without a key, the reply says only whether the server works."""

    async def answer(request: Request) -> Response:
        health_now = health()
        status = 503 if health_now.status == "unavailable" else 200
        body = health_now if caller_of(request).is_authenticated else HealthStatus(health_now.status)
        return Response(msgspec.json.encode(body), status, media_type="application/json")

    summary = "Report the health and the load of the server"
    return [Endpoint("GET", path, answer, summary, gives=Health, fails_with=Health) for path in HEALTH_PATHS]


def _health(service: ChatService) -> Health:
    """Report the state of the service from its heartbeats, without waiting for the engine or other work."""
    streams = service.streams
    problem, state, running = service.problem(), streams.state(), streams.running_by_class()
    return Health(
        status="unavailable" if problem else "ok",
        running=state.running,
        waiting=sum(state.waiting),
        running_by_class={name: running[service] for name, service in CLASS_NAMES.items()},
        waiting_by_class={name: state.waiting_in(service) for name, service in CLASS_NAMES.items()},
        kv_blocks=state.kv_blocks,
        kv_blocks_held=state.kv_blocks_held,
        reason=problem,
    )


def _embedding_health(service: EmbeddingService) -> Health:
    """Report the health of an embedding model, in the same fields as for a chat model.

    All requests are of one class, none waits for a slot, and there is no cache.
    """
    none, problem = dict.fromkeys(CLASS_NAMES, 0), service.problem()
    running = {**none, ServiceClass.NORMAL.name.lower(): service.requests}
    status: Status = "unavailable" if problem else "ok"
    return Health(status, service.requests, 0, running, none, kv_blocks=0, kv_blocks_held=0, reason=problem)


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
