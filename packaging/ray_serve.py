"""Serve one model from several replicas with Ray Serve.

    pip install "inglenook[ray]"
    INGLE_API_KEY=secret serve run --app-dir packaging ray_serve:application model=qwen3:8b replicas=2

Each replica is a separate process with a whole engine and its API. The ingress passes HTTP requests to them. Ray's
`PrefixCacheAffinityRouter` sends a request to the replica that got the longest common prefix before, so that each
replica reuses its own KV cache. Replicas on one machine share the cache on disk: a conversation continues from there if
its replica died. Settings come from the configuration file and from INGLE_* variables, as for `ingle serve`.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

with suppress(ModuleNotFoundError):  # a checkout has no such module
    import inglenook  # noqa: F401 # makes the modules of the installed program importable

from app.errors import InvalidSetting
from app.progress import SilentProgress
from app.server.http.endpoint import framing_of
from app.server.http.request_body import MAX_BODY_BYTES
from app.settings.api_keys import chosen_keys
from app.settings.settings import load_settings
from engine.errors import EngineError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

# Fields of requests that become the prompt, in the order of their text in it
_PROMPT_FIELDS = ("model", "system", "instructions", "tools", "messages", "input", "prompt")
_HOP_BY_HOP = (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade")
# Requests in progress by which one replica may exceed another before the router ignores prefixes. Ray's default is
# infinite: all requests with one system prompt would go to one replica.
_IMBALANCE = 8
_TREE_CHARACTERS = 20_000_000  # limit of the prompts that the router remembers; Ray's default is no limit
_TRIES = 3  # replicas that are tried for a request before an error is returned
_REQUESTS = 256  # concurrent requests of a replica
_DIED = msgspec.Raw(
    msgspec.json.encode(
        {"error": {"message": "The replica that wrote this reply has died. Send the request again.", "type": "error"}}
    )
)


class Arguments(BaseModel):
    """The arguments of `serve run`, as NAME=VALUE."""

    model: str | None = None  # default: the setting
    replicas: int = 2
    threads: int = 0  # CPU threads of each replica; 0: the setting
    gpus: float = 0.0  # GPUs of each replica
    routing: Literal["prefix", "load"] = "prefix"  # what decides which replica gets a request


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a client. The router compares its `prompt` with those of earlier requests."""

    prompt: str
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    server: tuple[str, int | None] | None  # address at which it arrived


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    broken: bytes  # ends the response if its replica dies; empty: the connection must be closed


def prompt_of(path: str, body: bytes) -> str:
    """Return the text of a request that should share a replica with requests of the same prefix. It is never empty."""
    with suppress(msgspec.DecodeError):
        fields = msgspec.json.decode(body, type=dict[str, Any])
        given = [msgspec.json.encode(fields[name]).decode() for name in _PROMPT_FIELDS if name in fields]
        return "\n".join((*given, path))
    return path


class Replica:
    """One engine with its API, in this process."""

    def __init__(self, options: Mapping[str, object]) -> None:
        from app.server.application import create_application
        from app.server.host import access_policy
        from app.server.hosted_models import hosted_models
        from engine.freed_memory import share_pools

        share_pools()
        settings = load_settings(**options)
        self._stack = ExitStack()
        self._hosted = self._stack.enter_context(hosted_models(settings, access_policy(settings), SilentProgress()))
        self._application = create_application(self._hosted.models, self._hosted.context)
        self._loading: asyncio.Task[None] | None = None

    async def reconfigure(self, _: object) -> None:
        """Load the model. Ray Serve sends no request before this ends."""
        from app.server.host import tune_interpreter

        models = self._hosted.models
        await models.residents.load(models.names.default.key)
        tune_interpreter()

    async def check_health(self) -> None:
        """Raise EngineError if the engine has failed for good; Ray Serve then starts another replica."""
        if problem := self._hosted.models.residents.failure:
            raise EngineError(f"The engine has failed: {problem}")

    async def answer(self, asked: Asked) -> AsyncGenerator[Head | bytes]:
        """Yield the head of the response, then the pieces of its body."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=16)
        left = asyncio.Event()
        unread = [asked.body]
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": asked.method,
            "scheme": "http", "path": asked.path, "raw_path": asked.path.encode(), "query_string": asked.query,
            "root_path": "", "headers": asked.headers, "client": None, "server": asked.server, "state": {},
        }  # fmt: skip

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._application(scope, receive, messages.put)
            finally:
                await messages.put(None)

        running = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield Head(message["status"], list(message["headers"]), _broken(scope, message["headers"]))
                elif body := message.get("body"):
                    yield body
            await running
        finally:
            left.set()
            running.cancel()

    async def __del__(self) -> None:
        await asyncio.gather(self._hosted.models.residents.close(), self._hosted.pulls.close())
        self._stack.close()


def _broken(scope: Scope, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the bytes that end a stream of this format with an error; empty if the response is no stream."""
    kind = dict(headers).get(b"content-type", b"").decode("latin-1")
    if not kind.startswith(("text/event-stream", "application/x-ndjson")):
        return b""
    return framing_of(scope).failure(_DIED)


async def pass_on(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application of the ingress: send a request to a replica, and return its response."""
    if scope["type"] != "http":
        return
    body = await _body(receive)
    if len(body) > MAX_BODY_BYTES:
        await _refusal(413, f"The body exceeds the limit of {MAX_BODY_BYTES:,} bytes.")(scope, receive, send)
        return
    headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_BY_HOP]
    path, server = scope["path"], scope.get("server")
    asked = Asked(prompt_of(path, body), scope["method"], path, scope["query_string"], headers, body, server)
    passing = asyncio.create_task(_pass(asked, scope, receive, send))
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (passing, leaving):
            task.cancel()
        await asyncio.wait((passing, leaving))
    if not passing.cancelled() and (problem := passing.exception()):
        raise problem


async def _pass(asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the request to a replica. If it dies before the head of its response, try another one."""
    replicas = cast("Ingress", serve.get_replica_context().servable_object).replicas
    for _ in range(_TRIES):
        head: Head | None = None
        pieces = replicas.remote(asked)
        try:
            async for piece in pieces:
                if isinstance(piece, Head):
                    head = piece
                    await send({"type": "http.response.start", "status": head.status, "headers": head.headers})
                else:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        except RayError:
            if head is not None:
                if not head.broken:
                    raise  # closes the connection
                await send({"type": "http.response.body", "body": head.broken, "more_body": False})
                return
        finally:
            pieces.cancel()  # does nothing if all pieces were read
    await _refusal(503, "No replica could answer. Send the request again.")(scope, receive, send)


async def _body(receive: Receive) -> bytes:
    """Return the body, or its first part if it is longer than the limit."""
    body, more = bytearray(), True
    while more and len(body) <= MAX_BODY_BYTES:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


async def _left(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _refusal(status: int, message: str) -> Response:
    body = msgspec.json.encode({"error": {"message": message, "type": "server_error"}})
    return Response(body, status, {"Retry-After": "2"} if status == 503 else None, media_type="application/json")


class Ingress:
    """Passes HTTP requests to the replicas."""

    def __init__(self, replicas: "DeploymentHandle[Any]") -> None:
        self.replicas = replicas.options(method_name="answer", stream=True)


def _prefix_router() -> RequestRouterConfig:
    """Return the prefix-aware router of Ray.

    Its public module needs pyarrow, which is larger than Ray, so that the class is imported from its own module.
    """
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter

    limits = {
        "imbalanced_threshold": _IMBALANCE,
        "do_eviction": True,
        "eviction_threshold_chars": _TREE_CHARACTERS,
        "eviction_target_chars": _TREE_CHARACTERS * 9 // 10,
    }
    return RequestRouterConfig(request_router_class=PrefixCacheAffinityRouter, request_router_kwargs=limits)


def application(arguments: Arguments) -> serve.Application:
    """Build the application of Ray Serve. Raises InvalidSetting if no API key is set."""
    options = {"model": arguments.model, "threads": arguments.threads or None}
    if not chosen_keys(load_settings(**options)):
        raise InvalidSetting("replicas need an API key", "Set INGLE_API_KEY or INGLE_API_KEY_FILE.")
    replica = serve.deployment(
        Replica,
        name="Replica",
        num_replicas=arguments.replicas,
        max_ongoing_requests=_REQUESTS,
        user_config={},  # so that Ray Serve calls `reconfigure`
        request_router_config=_prefix_router() if arguments.routing == "prefix" else RequestRouterConfig(),
        ray_actor_options={"num_cpus": max(1, arguments.threads), "num_gpus": arguments.gpus},
    )
    ingress = serve.deployment(
        serve.ingress(lambda: pass_on)(Ingress),
        name="Ingress",
        max_ongoing_requests=_REQUESTS * arguments.replicas,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(replica.bind(options))
