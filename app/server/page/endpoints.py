"""The page for browsers at the server's address: its files, and the replies and clients that it shows.

The files contain no data and need no key. The scripts read the data from this server's other routes, with the key that
the user enters if the server requires one.
"""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from app.generation.cache_report import MissReason
from app.generation.recent_replies import RecentReply
from app.server.http.access import PAGE_FILES, PAGE_PATH
from app.server.http.endpoint import TEXT, Endpoint
from app.server.http.errors import InvalidRequest
from app.server.http.reply import json_reply
from app.server.origin import may_see
from app.server.served_models import ServedModels

GREETING = "Ollama is running"  # programs look for this text

_FOLDER = Path(__file__).parent
_MEDIA_TYPES: Mapping[str, str] = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
FILES = tuple(sorted(path.name for path in _FOLDER.iterdir() if path.suffix in _MEDIA_TYPES))

# The page loads only files of this server and connects only to it. Its scripts cannot turn text into HTML.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Mapping[str, str] = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class ReplyReport(Struct):
    """A request that has ended. It has no text."""

    model: str
    client: str  # the user agent
    service_class: str
    ended_at: float  # Unix time
    prompt_tokens: int
    device_tokens: int  # cached tokens of the prompt by tier
    host_tokens: int
    disk_tokens: int
    computed_tokens: int  # the other tokens of the prompt
    miss: MissReason | None  # why tokens were computed that might have been cached
    missed_at: int | None  # index of the first of these tokens
    reply_tokens: int
    first_token_seconds: float | None  # null: no reply was complete
    seconds: float
    outcome: str  # why the request ended early; empty: it did not


class ReplyReports(Struct):
    """The last replies, newest first."""

    replies: list[ReplyReport]


class ClientReport(Struct):
    """A program that `ingle connect` sets up."""

    name: str  # in commands
    title: str
    launches: bool  # whether `ingle with` runs it


class ClientReports(Struct):
    clients: list[ClientReport]


class PageEndpoints:
    """The page, its files, and the data that only it needs."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def endpoints(self) -> list[Endpoint]:
        greeting, files = "Report that the server runs, or return the page for browsers", "Return a file of the page"
        replies, clients = "Report the last replies without their text", "List the programs that ingle can set up"
        return [
            Endpoint("GET", PAGE_PATH, self.greet, greeting, gives=TEXT),
            Endpoint("GET", f"{PAGE_FILES}{{file}}", self.file, files, gives=TEXT),
            Endpoint("GET", "/inglenook/replies", self.replies, replies, gives=ReplyReports),
            Endpoint("GET", "/inglenook/clients", self.clients, clients, gives=ClientReports),
        ]

    async def greet(self, request: Request) -> Response:
        """Return the text that programs look for, or the page if a browser asks."""
        if "text/html" in request.headers.get("accept", ""):
            return _file("page.html")
        return PlainTextResponse(GREETING, headers={"vary": "accept"})

    async def file(self, request: Request) -> Response:
        name = request.path_params["file"]
        if name not in FILES:
            raise InvalidRequest("The page has no such file", status=404)
        return _file(name)

    async def replies(self, request: Request) -> Response:
        found = [_report(reply) for reply in self._models.recent if may_see(request, reply.origin)]
        return json_reply(ReplyReports(found))

    async def clients(self, request: Request) -> Response:
        from app.connect.clients import CLIENTS  # only the page needs it

        found = [ClientReport(client.name, client.title, client.launch is not None) for client in CLIENTS]
        return json_reply(ClientReports(found))


def _file(name: str) -> Response:
    path = _FOLDER / name
    headers = {**HEADERS, "vary": "accept"}
    return Response(path.read_bytes(), headers=headers, media_type=_MEDIA_TYPES[path.suffix])


def _report(reply: RecentReply) -> ReplyReport:
    return ReplyReport(
        model=reply.model,
        client=reply.origin.client,
        service_class=reply.origin.service.name.lower(),
        ended_at=round(reply.ended_at, 3),
        prompt_tokens=reply.prompt,
        device_tokens=reply.sources.device,
        host_tokens=reply.sources.host,
        disk_tokens=reply.sources.disk,
        computed_tokens=reply.sources.computed,
        miss=reply.miss,
        missed_at=reply.missed_at,
        reply_tokens=reply.completion,
        first_token_seconds=reply.first_token_seconds,
        seconds=round(reply.total_seconds, 3),
        outcome=reply.outcome,
    )
