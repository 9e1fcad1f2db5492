"""HTTP to one server: JSON answers, streams of server-sent events, and the errors of both.

Imports neither torch nor a tokenizer. https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from app.client.server_sent_events import EventReader
from app.errors import AppError, ModelNotFound
from engine.errors import PromptTooLong
from quant.errors import InglenookError

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_REASONS = ("error", "message", "detail", "msg")  # the names that servers have for it
_LONGEST_REASON = 300  # characters that are told of it

_ERROR_KINDS: Mapping[object, type[InglenookError]] = {
    "context_length_exceeded": PromptTooLong,
    "model_not_found": ModelNotFound,
}


class ServerUnreachable(AppError):
    """The server does not answer, or stopped answering."""


class ServerError(AppError):
    """The server answered with an error."""


@dataclass(frozen=True, slots=True)
class Remedies:
    """Advice in the errors of one server."""

    unreachable: str
    senseless: str = "Stop it, and start it again."
    refused: Mapping[int, str] = field(default_factory=dict)  # by status; for errors that have no advice of their own


class HTTPClient:
    """Requests to one server. `close` it in the end: that closes its connections, which ends what they asked for."""

    def __init__(
        self,
        url: str,
        key: str | None,
        remedies: Remedies,
        *,
        answer_seconds: float,
        headers: Mapping[str, str] | None = None,
        uses_proxies: bool = False,
    ) -> None:
        """`key`: the API key; None: the server needs none. `answer_seconds` bounds all waits but the one for tokens,
        which the user ends. `uses_proxies`: as the environment names them."""
        self._url = url
        self._remedies = remedies
        self._answer_seconds = answer_seconds
        secret = {} if key is None else {"Authorization": f"Bearer {key}"}
        timeout = httpx.Timeout(answer_seconds, read=None)
        self._http = httpx.AsyncClient(headers={**(headers or {}), **secret}, timeout=timeout, trust_env=uses_proxies)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(
        self, method: str, url: str, body: object = None, *, accepted: Sequence[int] = (httpx.codes.OK,)
    ) -> Any:
        """The JSON of an answer. Raises ServerUnreachable or ServerError."""
        try:
            response = await self._http.request(method, url, json=body, timeout=self._answer_seconds)
        except httpx.HTTPError as problem:
            raise self._unreachable(problem) from problem
        if response.status_code not in accepted:
            raise self._refused(response.status_code, response.content)
        with self.as_agreed():
            return json.loads(response.content)

    async def stream(self, url: str, body: object) -> AsyncGenerator[Any]:
        """The JSON of each event of the answer to a POST.

        Closing the generator closes the connection, which ends the answer. Raises ServerUnreachable, ServerError,
        PromptTooLong or ModelNotFound.
        """
        events = EventReader()
        try:
            async with self._http.stream("POST", url, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise self._refused(response.status_code, await response.aread())
                async for part in response.aiter_bytes():
                    for data in events.feed(part):
                        with self.as_agreed():
                            event = json.loads(data)
                        yield event
                    if events.ended:
                        return
        except httpx.HTTPError as problem:
            raise self._unreachable(problem) from problem

    def as_agreed(self) -> AbstractContextManager[None]:
        """Raise ServerError if the body cannot make sense of an answer of this server."""
        return as_agreed(self._remedies.senseless)

    def _refused(self, status: int, content: bytes) -> InglenookError:
        problem = refusal(status, content)
        problem.remedy = problem.remedy or self._remedies.refused.get(status, "")
        return problem

    def _unreachable(self, problem: httpx.HTTPError) -> ServerUnreachable:
        reason = str(problem) or type(problem).__name__
        return ServerUnreachable(f"the server at {self._url} does not answer: {reason}", self._remedies.unreachable)


@contextmanager
def as_agreed(remedy: str = "Stop it, and start it again.") -> Iterator[None]:
    """Raise ServerError if the body cannot make sense of an answer."""
    try:
        yield
    except _UNREADABLE as problem:
        raise ServerError("the server's answer makes no sense", remedy) from problem


def refusal(status: int, content: bytes) -> InglenookError:
    """The error that an error answer describes, in whichever form."""
    try:
        return error_of(json.loads(content)["error"])
    except _UNREADABLE:
        said = _brief(_said(content))
        return ServerError(f"the server answered with status {status}{f': {said}' if said else ''}")


def error_of(error: Mapping[str, Any]) -> InglenookError:
    """The error that an error object of a server of ours describes. Raises what `as_agreed` catches."""
    prompt, context = error.get("n_prompt_tokens"), error.get("n_ctx")
    if isinstance(prompt, int) and isinstance(context, int):  # in the words of an engine in this process
        problem = f"The prompt has {prompt:,} tokens, and the context holds {context:,} including the reply"
        return PromptTooLong(problem, "Shorten the prompt, or raise the context length.")
    return _ERROR_KINDS.get(error.get("code"), ServerError)(_brief(str(error["message"])))


def _said(content: bytes) -> str:
    """What an error answer of others says: text, or JSON in whichever form."""
    try:
        return _text_in(json.loads(content))
    except _UNREADABLE:
        text = content.decode(errors="replace").strip()
        return "" if text.startswith("<") else text  # a page is for browsers


def _text_in(part: object) -> str:
    """The first text in what a server calls the reason."""
    if isinstance(part, Mapping):
        return next(filter(None, (_text_in(part.get(name)) for name in _REASONS)), "")
    if isinstance(part, list):
        return next(filter(None, map(_text_in, part)), "")
    return part if isinstance(part, str) else ""


def _brief(text: str) -> str:
    """One line that a person reads, and that goes on behind a full stop."""
    line = " ".join(text.split())
    return f"{line[:_LONGEST_REASON]}…" if len(line) > _LONGEST_REASON else line.removesuffix(".")


def told_sampling(model: Mapping[str, Any]) -> Mapping[str, float] | None:
    """What an entry of a server's list of models says of the sampling of requests that leave it open."""
    told = model.get("default_sampling")
    return None if told is None else msgspec.convert(told, dict[str, int | float])
