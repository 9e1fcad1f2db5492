"""Requests with a nonce: the server remembers that they arrived and how they ended, so that a probe can find them.

A probe puts a nonce of a fixed form into a prompt. Only the bytes of a body are searched for that form, so other
requests cost nearly nothing. Records contain no text of a request.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.generation.events import TokenCounts
from app.generation.request_log import ON_END
from app.server.http.access import CALLER, Caller
from app.server.http.endpoint import Endpoint
from app.server.http.errors import InvalidRequest
from app.server.http.reply import json_reply

MAX_RECORDS = 256
MAX_NONCES = 8  # of one request

_PREFIX: Final = b"ingle-probe-"
_NONCE: Final = re.compile(rb"ingle-probe-[0-9a-f]{32}")
_SEEN: Final = "inglenook.seen"  # key in an ASGI scope of the record of a request

# Fields that limit a reply, in the order of precedence. Ollama has its limit among the options.
_REPLY_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens", "n_predict", "num_predict")


class SeenRequest(Struct):
    """A request with a nonce."""

    path: str
    client: str = ""  # the user agent
    model: str = ""  # as the request names it
    max_tokens: int | None = None  # limit of the reply; null: the request has none
    tools: int = 0  # number of its tools
    tool_results: int = 0  # number of results of tool calls in its messages
    status: int | None = None  # HTTP status of the response; null: there is none yet
    ended: bool = False  # whether the whole response was sent, and no error ended its reply
    prompt_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt that were in the cache
    completion_tokens: int = 0


class SeenReport(Struct):
    """The requests with a nonce, the oldest first."""

    requests: list[SeenRequest]


class SeenRequests:
    """The last requests with a nonce."""

    def __init__(self) -> None:
        self._records: deque[_Kept] = deque(maxlen=MAX_RECORDS)

    @property
    def endpoint(self) -> Endpoint:
        summary = "Report the requests whose prompt has a nonce"
        return Endpoint("GET", "/inglenook/seen", self._report, summary, gives=SeenReport)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Return an ASGI application around `app` that records how requests with a nonce end."""

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].startswith("/inglenook/"):
                await app(scope, receive, send)
                return
            scope[_SEEN] = record = _Record(scope, self._records.append)

            async def recorded_send(message: Message) -> None:
                await send(message)
                record.add(message)

            await app(scope, receive, recorded_send)

        return application

    async def _report(self, request: Request) -> Response:
        """Report the requests with the nonce in the query. Callers with a separate cache see only their own."""
        nonce = request.query_params.get("nonce", "").encode()
        if not _NONCE.fullmatch(nonce):
            raise InvalidRequest("nonce: it must be ingle-probe- and 32 hexadecimal digits", parameter="nonce")
        salt = _salt(request.scope)
        shown = [kept.record for kept in self._records if nonce in kept.nonces and salt in ("", kept.salt)]
        return json_reply(SeenReport(shown))


@dataclass(frozen=True, slots=True)
class _Kept:
    """A record, its nonces, and the cache salt of its caller."""

    nonces: frozenset[bytes]
    salt: str
    record: SeenRequest


def _salt(scope: Scope) -> str:
    caller: Caller = scope["state"][CALLER]
    return caller.cache_salt


class _Record:
    """Fills the record of one request, if its body has a nonce."""

    def __init__(self, scope: Scope, keep: Callable[[_Kept], None]) -> None:
        self._scope = scope
        self._keep = keep
        self._seen: SeenRequest | None = None
        self.nonce = ""
        self._has_failed = False

    def find(self, body: bytes) -> None:
        nonces = frozenset(_NONCE.findall(body)[:MAX_NONCES])
        if not nonces:
            return
        headers = dict(self._scope["headers"])
        client = headers.get(b"user-agent", b"").decode("latin-1")[:80]
        self.nonce = min(nonces).decode()
        self._seen = SeenRequest(self._scope["path"], client, *_described(body))
        self._keep(_Kept(nonces, _salt(self._scope), self._seen))
        ON_END.set(self._count)

    def _count(self, counts: TokenCounts, *, failed: bool) -> None:
        if self._seen is not None:
            self._has_failed |= failed
            self._seen.prompt_tokens += counts.prompt
            self._seen.cached_tokens += counts.cache.sources.cached
            self._seen.completion_tokens += counts.completion

    def add(self, message: Message) -> None:
        """Record the status, and the end of the response."""
        if self._seen is None:
            return
        self._seen.status = message.get("status", self._seen.status)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._seen.ended = not self._has_failed


def note_body(request: Request, body: bytes) -> None:
    """Record a request whose body has a nonce."""
    if _PREFIX in body and (record := request.scope.get(_SEEN)) is not None:
        record.find(body)


def nonce_of(request: Request) -> str:
    """Return the nonce in the body of a request; empty if it has none."""
    record: _Record | None = request.scope.get(_SEEN)
    return "" if record is None else record.nonce


def _described(body: bytes) -> tuple[str, int | None, int, int]:
    """Return the model, the limit of the reply, the number of tools, and that of their results in a body.

    They are unknown if it is not JSON.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", None, 0, 0
    if not isinstance(fields, Mapping):
        return "", None, 0, 0
    model, tools = fields.get("model"), fields.get("tools")
    number = len(tools) if isinstance(tools, list) else 0
    return str(model or "")[:256], _reply_limit(fields), number, _tool_results(fields)


def _tool_results(fields: Mapping[str, Any]) -> int:
    """Count the results of tool calls: messages of the role tool, or parts and items of a type for results."""
    found = 0
    unread: list[object] = [fields.get("messages"), fields.get("input")]
    while unread:
        match unread.pop():
            case {"role": "tool"} | {"type": "tool_result" | "function_call_output" | "custom_tool_call_output"}:
                found += 1
            case {"content": list(parts)} | list(parts):
                unread += parts
    return found


def _reply_limit(fields: Mapping[str, Any]) -> int | None:
    options = fields.get("options")
    given = {**(options if isinstance(options, Mapping) else {}), **fields}
    limits = (given.get(name) for name in _REPLY_LIMITS)
    return next((limit for limit in limits if isinstance(limit, int)), None)
