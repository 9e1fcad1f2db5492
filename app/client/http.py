"""HTTP client of one server: JSON responses, streams of server-sent events, and errors.

Does not import torch. https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from app.client.pinned_tls import pinned_context, wrong_certificate
from app.client.server_sent_events import EventReader
from app.errors import AppError, ModelNotFound
from app.settings.boxes import BOX_HEADER, Box
from engine.errors import PromptTooLong
from quant.errors import InglenookError

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_REASONS = ("error", "message", "detail", "msg")  # JSON keys under which servers report the reason of an error
# messages of the HTTP library in words for users
_PLAIN_WORDS: Mapping[str, str] = {"All connection attempts failed": "it accepts no connection"}
_LONGEST_REASON = 300  # maximum length of the shown reason in characters
_MAX_ANSWER_BYTES = 64 << 20  # of one answer, which is not a stream
# idle connections are closed after this time: uvicorn closes them after 5 s, and may reset one that is being used again
KEEP_ALIVE_SECONDS = 2.0


class ServerUnreachable(AppError):
    """The server does not respond, or closed the connection."""


class ServerSilent(ServerUnreachable):
    """The server accepted the connection, and does not answer. It may be loading its model."""


class ServerError(AppError):
    """The server returned an error."""


class ServerLoading(ServerError):
    """The server is loading its model."""


_ERROR_KINDS: Mapping[object, type[InglenookError]] = {
    "context_length_exceeded": PromptTooLong,
    "model_not_found": ModelNotFound,
    503: ServerLoading,  # llama.cpp's server
}


@dataclass(frozen=True, slots=True)
class Remedies:
    """The remedies that errors about one server suggest."""

    unreachable: str
    senseless: str = "Stop it, and start it again."
    # keys: HTTP statuses; values: remedies for error responses without a remedy
    refused: Mapping[int, str] = field(default_factory=dict)
    replaced: str = ""  # for another certificate than the expected one


def remedies_of(box: Box) -> Remedies:
    """Return the remedies for errors about a box."""
    refused = f"On that machine, run ingle share. Then run ingle box add {box.name} LINE with its new line."
    return Remedies(
        f"Start the server of {box.name} with ingle serve.",
        f"Update ingle on {box.name}.",
        dict.fromkeys((httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN), refused),
        refused,
    )


class HTTPClient:
    """Sends requests to one server. Call `close` at the end: it closes the connections, which aborts their requests."""

    def __init__(
        self,
        url: str,
        key: str | None,
        remedies: Remedies,
        *,
        answer_seconds: float,
        headers: Mapping[str, str] | None = None,
        uses_proxies: bool = False,
        box: Box | None = None,
    ) -> None:
        """Create the client. It connects on the first request.

        `key`: the API key; None: the server needs none. `answer_seconds`: timeout of every wait, except for tokens of a
        stream, which the user can end. `uses_proxies`: use the proxies that the environment names. `box`: the box at
        `url`, whose own key is sent instead.
        """
        self._url = url
        self._remedies = remedies
        self._answer_seconds = answer_seconds
        key = key if box is None else box.key
        secret = {} if key is None else {"Authorization": f"Bearer {key}"}
        known_as = {} if box is None else {BOX_HEADER: box.name}
        # reading the certificates takes 30 ms
        verify = uses_proxies or not url.startswith("http:") if box is None else pinned_context(box.fingerprint)
        self._http = httpx.AsyncClient(
            headers={**(headers or {}), **secret, **known_as},
            timeout=httpx.Timeout(answer_seconds, read=None),
            limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS),
            trust_env=uses_proxies,
            verify=verify,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(
        self,
        method: str,
        url: str,
        body: object = None,
        *,
        accepted: Sequence[int] = (httpx.codes.OK,),
        waits: bool = False,
    ) -> Any:
        """Send a request and return the JSON of the response. `waits`: wait for it without a timeout.

        Raises ServerUnreachable or ServerError.
        """
        timeout = httpx.Timeout(self._answer_seconds, read=None if waits else self._answer_seconds)
        try:
            async with self._http.stream(method, url, json=body, timeout=timeout) as response:
                content = await self._whole(response)
        except httpx.HTTPError as problem:
            raise self._unreachable(problem) from problem
        if response.status_code not in accepted:
            raise self._refused(response.status_code, content)
        with self.parsing_response():
            return json.loads(content)

    async def _whole(self, response: httpx.Response) -> bytes:
        """Return the body of a response. Raises ServerError if it is longer than _MAX_ANSWER_BYTES."""
        content = bytearray()
        async for part in response.aiter_bytes():
            content += part
            if len(content) > _MAX_ANSWER_BYTES:
                raise ServerError(f"the answer of {self._url} is longer than {_MAX_ANSWER_BYTES:,} bytes")
        return bytes(content)

    async def stream(self, url: str, body: object) -> AsyncGenerator[Any]:
        """Send a POST and yield the JSON of each server-sent event of the response.

        Closing the generator closes the connection, which aborts the reply. Raises ServerUnreachable, ServerError,
        PromptTooLong, or ModelNotFound.
        """
        events = EventReader()
        async with aclosing(self._parts(url, body)) as parts:
            async for part in parts:
                for data in events.feed(part):
                    yield self._parsed(data)
                if events.ended:
                    return

    async def lines(self, url: str, body: object) -> AsyncGenerator[Any]:
        """Send a POST and yield the JSON of each line of the response. See `stream`."""
        unread = b""
        async with aclosing(self._parts(url, body)) as parts:
            async for part in parts:
                *lines, unread = (unread + part).split(b"\n")
                for line in filter(None, lines):
                    yield self._parsed(line)
        if unread:
            yield self._parsed(unread)

    async def _parts(self, url: str, body: object) -> AsyncGenerator[bytes]:
        try:
            async with self._http.stream("POST", url, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise self._refused(response.status_code, await self._whole(response))
                async for part in response.aiter_bytes():
                    yield part
        except httpx.HTTPError as problem:
            raise self._unreachable(problem) from problem

    def _parsed(self, data: bytes) -> Any:
        with self.parsing_response():
            return json.loads(data)

    def parsing_response(self) -> AbstractContextManager[None]:
        """Raise ServerError if the body fails to parse a response of this server."""
        return parsing_response(self._remedies.senseless)

    def _refused(self, status: int, content: bytes) -> InglenookError:
        problem = refusal(status, content)
        problem.remedy = problem.remedy or self._remedies.refused.get(status, "")
        return problem

    def _unreachable(self, problem: httpx.HTTPError) -> ServerUnreachable:
        if isinstance(problem, httpx.ReadTimeout):
            reason = f"no answer in {self._answer_seconds:g} s"
            return ServerSilent(f"the server at {self._url} does not respond: {reason}", self._remedies.unreachable)
        if (wrong := wrong_certificate(problem)) is not None:
            return ServerUnreachable(f"the server at {self._url} is refused: {wrong.strerror}", self._remedies.replaced)
        reason = _PLAIN_WORDS.get(str(problem), str(problem)) or type(problem).__name__
        return ServerUnreachable(f"the server at {self._url} does not respond: {reason}", self._remedies.unreachable)


@contextmanager
def parsing_response(remedy: str = "Stop it, and start it again.") -> Iterator[None]:
    """Raise ServerError if the body fails to parse a response."""
    try:
        yield
    except _UNREADABLE as problem:
        raise ServerError("the server's response is not in the expected format", remedy) from problem


def refusal(status: int, content: bytes) -> InglenookError:
    """Return the error that an error response describes, in any format."""
    try:
        return error_of(json.loads(content)["error"])
    except _UNREADABLE:
        said = _brief(_said(content))
        return ServerError(f"the server returned status {status}{f': {said}' if said else ''}")


def error_of(error: Mapping[str, Any]) -> InglenookError:
    """Return the error for the error object of an ingle server.

    Raises one of the errors that `parsing_response` converts.
    """
    prompt, context = error.get("n_prompt_tokens"), error.get("n_ctx")
    if isinstance(prompt, int) and isinstance(context, int):  # the same message as from an engine in this process
        problem = f"The prompt has {prompt:,} tokens, and the context holds {context:,} including the reply"
        return PromptTooLong(problem, "Shorten the prompt, or raise the context length.")
    return _ERROR_KINDS.get(error.get("code"), ServerError)(_brief(str(error["message"])))


def _said(content: bytes) -> str:
    """Return the reason in an error response of another server, whose body is text or JSON of any shape."""
    try:
        return _text_in(json.loads(content))
    except _UNREADABLE:
        text = content.decode(errors="replace").strip()
        return "" if text.startswith("<") else text  # an HTML page is not readable in a terminal


def _text_in(part: object) -> str:
    """Return the first string under a key that servers use for the reason."""
    if isinstance(part, Mapping):
        return next(filter(None, (_text_in(part.get(name)) for name in _REASONS)), "")
    if isinstance(part, list):
        return next(filter(None, map(_text_in, part)), "")
    return part if isinstance(part, str) else ""


def _brief(text: str) -> str:
    """Return the text as one line of limited length, without a period at the end."""
    line = " ".join(text.split())
    return f"{line[:_LONGEST_REASON]}…" if len(line) > _LONGEST_REASON else line.removesuffix(".")


def default_sampling_of(model: Mapping[str, Any]) -> Mapping[str, float] | None:
    """Return the default sampling from an entry of a server's list of models."""
    sampling = model.get("default_sampling")
    return None if sampling is None else msgspec.convert(sampling, dict[str, int | float])
