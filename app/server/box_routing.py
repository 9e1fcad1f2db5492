"""Routing of requests that name a model of a box, one of the user's other machines: they are passed to it by path.

The box gets the request as it is, with its own key and with the name by which this server knows it. It removes this
name from the names of models in the request and adds it to those in the reply (`app.server.model_names`), so that the
reply is passed on byte for byte.
"""

import asyncio
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.boxes import LISTS, STREAMS, BoxAway, Boxes, BoxLink, ListEntry, ReplyCut, chunks_of, media_type
from app.server.http.errors import InvalidRequest, ReplyBroken, error_response
from app.server.http.request_body import receive_body
from app.server.http.seen import note_body
from app.server.model_names import PREFIX, ModelNames
from app.settings.boxes import BOX_HEADER
from quant.errors import InglenookError

log = logging.getLogger(__name__)

_PATH = re.compile(r"/models/([^/]+)/.")  # a path with the name of a model
_STORED = re.compile(r"(?:/v1)?/responses/.")  # a path with the id of a stored response
_NAME = re.compile(rb"[a-z0-9][a-z0-9-]{0,31}")
_BOX_HEADER = BOX_HEADER.lower().encode()

# Headers that are not passed to a box: those of one connection, keys, and those that browsers add.
_DROPPED = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade host content-length accept-encoding expect authorization x-api-key cookie origin referer "
    b"forwarded".split()
)
_DROPPED_PREFIXES = (b"sec-", b"x-forwarded-", b"access-control-", _BOX_HEADER)
_PASSED_BACK = frozenset(
    (b"content-type", b"content-length", b"cache-control", b"x-accel-buffering", b"retry-after", b"allow")
)


class _Named(Struct):
    """The fields in which a body names a model."""

    model: Any = None
    name: Any = None
    instance_id: Any = None


class BoxRouting:
    """ASGI middleware after the access check: passes requests for models of boxes to them, and adds their models to
    lists. Requests of a machine for which this one is a box use the models of this machine only.
    """

    def __init__(self, app: ASGIApp, boxes: Boxes | None, names: ModelNames) -> None:
        self._app = app
        self._boxes = boxes
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        called = next((value for name, value in scope["headers"] if name == _BOX_HEADER), b"")
        if _NAME.fullmatch(called):
            PREFIX.set(f"{called.decode()}/")
            await self._app(scope, receive, send)
            return
        links = {} if self._boxes is None else self._boxes.links()
        if not links:
            await self._app(scope, receive, send)
        elif scope["method"] == "GET" and scope["path"] in LISTS:
            await self._list(links.values(), scope, receive, send)
        else:
            with suppress(ClientDisconnect):
                await self._route(links, scope, receive, send)

    async def _route(self, links: Mapping[str, BoxLink], scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the box of its model; to this server if it names no model of a box."""
        body = b""
        if scope["method"] == "POST":
            body = await receive_body(Request(scope, receive))
            receive = _with_body(body, receive)
        model = _named_model(scope, body, links)
        if model is None:
            await self._here_or_there(links.values(), scope, receive, send, body)
            return
        note_body(Request(scope), body)
        name, _, rest = model.partition("/")
        try:
            await self._pass(links[name], scope, body, send)
        except BoxAway as problem:
            raise await self._unavailable(problem, rest) from problem

    async def _here_or_there(
        self, links: Iterable[BoxLink], scope: Scope, receive: Receive, send: Send, body: bytes
    ) -> None:
        """Answer a request of this server. A stored response that it does not have may be on a box."""
        if not _STORED.match(scope["path"]):
            await self._app(scope, receive, send)
            return
        missing = _Withheld(send, HTTPStatus.NOT_FOUND)
        await self._app(scope, receive, missing.send)
        for link in links if missing.messages else ():
            with suppress(BoxAway):
                if await self._pass(link, scope, body, send, only_if_found=True):
                    return
        for message in missing.messages:
            await send(message)

    async def _pass(self, link: BoxLink, scope: Scope, body: bytes, send: Send, *, only_if_found: bool = False) -> bool:
        """Pass a request to a box, and its reply to the client. Returns whether a reply was sent.

        Raises BoxAway before anything was sent. `only_if_found`: a reply with status 404 is not sent.
        """
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        async with link.exchange(scope["method"], target, _passed_headers(scope), body) as response:
            link.check(response)
            if only_if_found and response.status_code == HTTPStatus.NOT_FOUND:
                return False
            back = [(name.lower(), value) for name, value in response.headers.raw if name.lower() in _PASSED_BACK]
            back.append((b"x-content-type-options", b"nosniff"))
            await send({"type": "http.response.start", "status": response.status_code, "headers": back})
            last = b"\n"
            try:
                async with aclosing(chunks_of(response)) as chunks:
                    async for chunk in chunks:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                        last = chunk[-1:] or last
            except ReplyCut:
                log.warning("%s ended a reply early", link.box.name)
                cut = InvalidRequest(f"{link.box.name} ended the reply early", "Try again.", status=502)
                error = _framed(bytes(error_response(cut, scope).body), media_type(response))
                if not error or last != b"\n":
                    raise ReplyBroken from None
                await send({"type": "http.response.body", "body": error, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return True

    async def _unavailable(self, problem: BoxAway, name: str) -> InvalidRequest:
        """Return the error for a client: it names a model of this machine that can answer instead."""
        try:
            local = (await self._names.find(name)).reply_name
        except InglenookError:
            local = (await self._names.find(None)).reply_name
        if problem.seconds is None:
            return InvalidRequest(problem.reason, problem.remedy, code="box_unusable", status=502)
        headers = {"retry-after": str(problem.seconds)}
        remedy = f"Until then, this machine has {local}."
        return InvalidRequest(problem.reason, remedy, code="box_away", status=503, headers=headers)

    async def _list(self, links: Iterable[BoxLink], scope: Scope, receive: Receive, send: Send) -> None:
        """Send a list of this server's models, and add those of the boxes."""
        path, reply = scope["path"], _WholeReply()
        entries, _ = await asyncio.gather(_all_entries(links, path), self._app(scope, receive, reply.send))
        if reply.status == HTTPStatus.OK and entries:
            await Response(_extended(reply.body, LISTS[path], entries), media_type="application/json")(
                scope, receive, send
            )
            return
        for message in reply.messages:
            await send(message)


async def _all_entries(links: Iterable[BoxLink], path: str) -> Sequence[msgspec.Raw]:
    """Return the entries of all boxes for a list."""
    found = await asyncio.gather(*(link.entries(path) for link in links))
    return [entry for entries in found for entry in entries]


class _Withheld:
    """Sends a reply, unless it has a certain status: its messages are kept instead."""

    def __init__(self, send: Send, status: int) -> None:
        self.messages: list[Message] = []
        self._send = send
        self._status = status

    async def send(self, message: Message) -> None:
        if self.messages or message.get("status") == self._status:
            self.messages.append(message)
        else:
            await self._send(message)


class _WholeReply:
    """Collects the messages of a reply."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def _extended(body: bytes, member: str, entries: Sequence[msgspec.Raw]) -> bytes:
    """Return a list of models with more entries."""
    reply = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    own = msgspec.json.decode(reply[member], type=list[msgspec.Raw])
    reply[member] = msgspec.Raw(msgspec.json.encode([*own, *entries]))
    if "last_id" in reply:
        reply["last_id"] = msgspec.Raw(msgspec.json.encode(msgspec.json.decode(entries[-1], type=ListEntry).id))
    return msgspec.json.encode(reply)


def _with_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns a body that was read already, and then what `receive` returns."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def _named_model(scope: Scope, body: bytes, links: Iterable[str]) -> str | None:
    """Return the name of a box's model in the path, the query, or the body of a request; None: it has none."""
    query = parse_qs(scope["query_string"].decode("latin-1")).get("model", [])
    in_path = _PATH.search(scope["path"])
    named: list[object] = [*query, scope["path"][in_path.start(1) :] if in_path else None]
    # most bodies are for other models, and are not decoded here; some clients escape the slash
    if any(f'"{name}{slash}'.encode() in body for name in links for slash in ("/", "\\/")):
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            fields = msgspec.json.decode(body, type=_Named)
            named += [fields.model, fields.name, fields.instance_id]
    names = (name for name in named if isinstance(name, str) and "/" in name)
    return next((name for name in names if name.partition("/")[0] in links), None)


def _passed_headers(scope: Scope) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers of a request that a box gets."""
    listed = [value.lower() for name, value in scope["headers"] if name == b"connection"]
    dropped = _DROPPED.union(name.strip() for value in listed for name in value.split(b","))
    for name, value in scope["headers"]:
        if name not in dropped and not name.startswith(_DROPPED_PREFIXES):
            yield name, value


def _framed(error: bytes, kind: str) -> bytes:
    """Return an error as the last part of a stream; empty if the reply is no stream."""
    framing = STREAMS.get(kind)
    return b"" if framing is None else framing.failure(msgspec.Raw(error))
