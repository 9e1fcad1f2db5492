"""A client of an OpenAI-compatible server: sends a conversation and yields the parts of the reply.

Imports little, so that the screens appear early.
"""

import json
import os
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote

import httpx
import msgspec

from app.chat_backend.reply_parts import ENGINE_STOPPED, Accepted, Call, Ended, ReasoningDelta, ReplyPart, TextDelta
from app.client.http import HTTPClient, Remedies, ServerUnreachable, default_sampling_of, refusal, remedies_of
from app.client.own_server import ModelLoad, load_lines
from app.errors import AppError, InvalidSetting
from app.generation.cache_report import MissReason, PromptTokensDetails
from app.generation.events import PromptProgress
from app.history.records import State, StoredUsage
from app.process.engine_lease import CHAT_CLIENT
from app.settings.boxes import Box
from app.settings.settings import APP_NAME


class ReplyClock:
    """Measures the times of a reply, starting when the clock is created."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first: float | None = None
        self._last = self._started

    def mark_token(self) -> None:
        """Record that tokens arrived now."""
        self._last = time.monotonic()
        if self._first is None:
            self._first = self._last

    @property
    def has_tokens(self) -> bool:
        """Whether tokens have arrived."""
        return self._first is not None

    @property
    def first_token_seconds(self) -> float:
        """Seconds until the first token arrived; until now if none has arrived."""
        return (self._first or time.monotonic()) - self._started

    @property
    def reply_seconds(self) -> float:
        """Seconds from the first token to the last one."""
        return self._last - (self._first or self._last)


NO_SENSE = "Check the address: the URL of an OpenAI-compatible server usually ends with /v1."
_KEY = "Give the key of this endpoint with --api-key-file."
_REMEDIES: Mapping[int, str] = {
    httpx.codes.UNAUTHORIZED: _KEY,
    httpx.codes.FORBIDDEN: _KEY,
    httpx.codes.TOO_MANY_REQUESTS: "Wait a moment, then try again.",
}


def checked_url(given: str) -> str:
    """Return the base URL `given` without a trailing slash. Raises InvalidSetting unless it is an http or https URL."""
    try:
        url = httpx.URL(given)
        is_complete = url.scheme in ("http", "https") and bool(url.host)
    except httpx.InvalidURL:
        is_complete = False
    if not is_complete:
        raise InvalidSetting(f"{given} is not the URL of an endpoint", "Write it like http://127.0.0.1:8000/v1.")
    return given.rstrip("/")


def _remedies(url: str, *, is_inglenook: bool) -> Remedies:
    """Return what to advise the user when a request to this endpoint fails."""
    if is_inglenook:
        return Remedies("Try again: the engine restarts.")
    lacks_version = {} if url.endswith("/v1") else {httpx.codes.NOT_FOUND.value: NO_SENSE}
    return Remedies("Check the address, or try again.", NO_SENSE, {**_REMEDIES, **lacks_version})


Body: TypeAlias = Mapping[str, object]

_ANSWER_SECONDS = 10.0
# time between two chunks of a reply: each chunk is drawn, which takes CPU time from the engine
_INTERVAL_MS = 250
_CHARACTERS_PER_TOKEN = 4  # an estimate for servers that cannot count tokens


class NotOffered(AppError):
    """The server has no route for this request."""


@dataclass(frozen=True, slots=True)
class ServedName:
    """A model that a server offers."""

    name: str
    context_length: int | None  # tokens; None: not reported
    is_inglenook: bool = False  # whether the server is Inglenook
    sampling: Mapping[str, float] | None = None  # the model's default sampling parameters; None: not reported
    parameters: int | None = None  # number of weights; None: not reported


class ChatEndpoint:
    """A connection to one server. Call `close` when you no longer need it."""

    def __init__(self, url: str, key: str | None, *, is_inglenook: bool, box: Box | None = None) -> None:
        """Prepare the HTTP client. No request is sent yet.

        `url` is the base URL for OpenAI clients, ending with /v1. `box` is the box that the server runs on; None: it is
        no box. Raises InvalidSetting if the URL is not an http or https URL.
        """
        self.url = checked_url(url)
        self.is_inglenook = is_inglenook
        self.is_on_this_machine = is_inglenook and box is None
        self._options = {"interval_ms": _INTERVAL_MS, "continuous_usage_stats": True} if is_inglenook else {}
        self._http = HTTPClient(
            self.url,
            key,
            _remedies(self.url, is_inglenook=is_inglenook) if box is None else remedies_of(box),
            answer_seconds=_ANSWER_SECONDS,
            headers={"User-Agent": f"{CHAT_CLIENT}/{os.getpid()}"},
            uses_proxies=not is_inglenook,
            box=box,
        )

    async def close(self) -> None:
        await self._http.close()

    async def names(self) -> Sequence[ServedName]:
        """Return the models that the server offers. Raises ServerUnreachable or ServerError."""
        answer = await self._http.ask("GET", f"{self.url}/models")
        with self._http.parsing_response():
            return [_served_name(model) for model in answer["data"]]

    async def call_inglenook(self, method: str, path: str, body: Body | None = None) -> Any:
        """Call a route that only Inglenook has, and return the answer. Raises NotOffered for other servers."""
        if not self.is_inglenook:
            raise NotOffered(f"the server at {self.url} does not support {path}", "Use an ingle server.")
        return await self._http.ask(method, f"{self._root}/inglenook/{path}", body)

    async def describe(self, model: str) -> ServedName:
        """Return what the server reports about a model. Raises ServerUnreachable, ModelNotFound, or ServerError."""
        answer = await self._http.ask("GET", f"{self.url}/models/{quote(model, safe='')}")
        with self._http.parsing_response():
            return _served_name(answer)

    def load(self, model: str) -> AsyncGenerator[ModelLoad]:
        """Load a model of an ingle server, and yield the progress. See `load_lines`."""
        return load_lines(self._http, self._root, {"model": model})

    @property
    def _root(self) -> str:
        return self.url.removesuffix("/v1")

    @contextmanager
    def _naming_a_crash(self) -> Iterator[None]:
        """Report a lost connection to an ingle server of this machine as a stopped engine."""
        try:
            yield
        except ServerUnreachable as problem:
            if not self.is_on_this_machine:
                raise
            raise ServerUnreachable(*ENGINE_STOPPED) from problem

    async def stream(self, body: Body) -> AsyncGenerator[ReplyPart]:
        """Yield the parts of a reply, starting when the server has accepted the request.

        Closing the generator closes the connection, which aborts the reply. Raises ServerUnreachable, ServerError,
        PromptTooLong, or ModelNotFound.
        """
        clock = ReplyClock()
        fold = _Fold(clock)
        asked = {**body, "stream": True, "stream_options": {"include_usage": True, **self._options}}
        async with aclosing(self._http.stream(f"{self.url}/chat/completions", asked)) as chunks:
            with self._naming_a_crash():
                async for chunk in chunks:
                    with self._http.parsing_response():
                        parts = fold.parts(chunk)
                    for part in parts:
                        yield part
        with self._http.parsing_response():
            ended = fold.end()
        yield ended

    async def stop(self, reply: str) -> None:
        """Tell the server to end a reply, so that it still reports the usage. Does nothing if the reply has ended.

        Raises NotOffered for servers other than Inglenook.
        """
        await self.call_inglenook("POST", "stop", {"reply": reply})

    async def complete(self, body: Body) -> str:
        """Request a reply, wait until it is complete, and return its text."""
        text = ""
        async with aclosing(self.stream(body)) as parts:
            async for part in parts:
                text += part.text if isinstance(part, TextDelta) else ""
        return text

    async def count(self, model: str, *, text: str = "", messages: Sequence[Body] = ()) -> int:
        """Return the number of tokens of a text or a conversation's prompt; an estimate if the server cannot count."""
        if self.is_inglenook:
            answer = await self.call_inglenook("POST", "count", {"model": model, "text": text, "messages": messages})
            with self._http.parsing_response():
                return int(answer["tokens"])
        characters = len(text) + sum(len(str(message["content"])) for message in messages)
        return -(-characters // _CHARACTERS_PER_TOKEN)


def _served_name(model: Mapping[str, Any]) -> ServedName:
    is_inglenook = model.get("owned_by") == APP_NAME
    sampling = default_sampling_of(model) if is_inglenook else None
    parameters = (model.get("meta") or {}).get("n_params")
    count = int(parameters) if parameters else None
    return ServedName(str(model["id"]), _context_length(model), is_inglenook, sampling, count)


def _context_length(model: Mapping[str, Any]) -> int | None:
    """Return the context length in tokens, from whichever field the server uses for it, or None."""
    meta = model.get("meta")
    found = model.get("context_length") or model.get("max_model_len") or (meta or {}).get("n_ctx")
    return int(found) if found else None


class _Fold:
    """Converts the chunks of a streamed completion to parts of a reply."""

    def __init__(self, clock: ReplyClock) -> None:
        self._clock = clock
        self._is_accepted = False
        self._state: State | None = None
        self._usage: Mapping[str, Any] | None = None
        self._timings: Mapping[str, Any] = {}
        self._tokens = 0  # number of tokens of the reply when the last delta arrived
        self._calls: dict[int, list[str]] = {}  # [name, arguments] of each tool call, by its index

    def parts(self, chunk: Any) -> list[ReplyPart]:
        """Return the parts that one chunk contains. Raises ServerError if the chunk reports that the reply failed."""
        if chunk.get("error"):
            raise refusal(500, json.dumps(chunk).encode())
        self._usage = chunk.get("usage") or self._usage
        self._timings = chunk.get("timings") or self._timings
        parts: list[ReplyPart] = []
        if not self._is_accepted and (reply := chunk.get("id")):
            parts.append(Accepted(str(reply)))
        self._is_accepted = True
        if progress := chunk.get("prompt_progress"):
            parts.append(
                PromptProgress(int(progress["processed"]), int(progress["total"]), int(progress.get("cache", 0)))
            )
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                parts.append(ReasoningDelta(str(thought), self._new_tokens(chunk)))
            if text := delta.get("content"):
                parts.append(TextDelta(str(text), self._new_tokens(chunk)))
            for call in delta.get("tool_calls") or ():
                self._add_call(call)
            if reason := choice.get("finish_reason"):
                self._state = State.CUT if reason == "length" else State.WHOLE
        if any(isinstance(part, TextDelta | ReasoningDelta) for part in parts):
            self._clock.mark_token()
        return parts

    def _new_tokens(self, chunk: Mapping[str, Any]) -> int:
        """Return the number of tokens since the last delta; 1 if the server reports no usage in this chunk."""
        usage = chunk.get("usage")
        before, self._tokens = self._tokens, int(usage.get("completion_tokens") or 0) if usage else self._tokens + 1
        return max(0, self._tokens - before)

    def _add_call(self, delta: Mapping[str, Any]) -> None:
        """Add a fragment of a tool call. If a server omits the index, each fragment is a complete call."""
        function = delta.get("function") or {}
        pieces = self._calls.setdefault(int(delta.get("index", len(self._calls))), ["", ""])
        pieces[0] = pieces[0] or str(function.get("name") or "")
        pieces[1] += str(function.get("arguments") or "")
        self._clock.mark_token()

    def end(self) -> Ended:
        if self._state is None:
            raise ServerUnreachable("the server ended the reply before it was complete", "Try again.")
        is_known = self._usage is not None or self._clock.has_tokens
        calls = [Call(name, arguments) for _, (name, arguments) in sorted(self._calls.items()) if name]
        usage = self._stored_usage(self._usage or {}) if is_known else None
        return Ended(self._state, usage, calls if self._state is State.WHOLE else ())

    def _stored_usage(self, usage: Mapping[str, Any]) -> StoredUsage:
        """Return the usage that the server reports. Times that it does not report are measured here."""
        prompt = int(usage.get("prompt_tokens") or 0)
        details = _details(usage)
        cached = min(details.cached_tokens, prompt)
        # A stopped request may have computed only part of its prompt: `prompt - cached` would then be too high.
        is_reported = "computed_tokens" in (usage.get("prompt_tokens_details") or ())
        queue = float(self._timings.get("queue_ms") or 0.0) / 1000
        reply = float(self._timings.get("predicted_ms") or 0.0) / 1000
        return StoredUsage(
            device_tokens=cached - details.host_tokens - details.disk_tokens,
            host_tokens=details.host_tokens,
            disk_tokens=details.disk_tokens,
            computed_tokens=details.computed_tokens if is_reported else prompt - cached,
            reply_tokens=int(usage.get("completion_tokens") or 0),
            queue_seconds=queue,
            prompt_seconds=max(0.0, self._clock.first_token_seconds - queue),
            reply_seconds=reply or self._clock.reply_seconds,
            miss=_sentence(details),
            is_detailed="queue_ms" in self._timings,
            drafted_tokens=int(self._timings.get("draft_n") or 0),
            accepted_tokens=int(self._timings.get("draft_n_accepted") or 0),
        )


def _details(usage: Mapping[str, Any]) -> PromptTokensDetails:
    """Return the report about the prompt's tokens; an empty report if the server uses another format."""
    try:
        return msgspec.convert(usage.get("prompt_tokens_details") or {}, PromptTokensDetails)
    except msgspec.ValidationError:
        return PromptTokensDetails()


def _sentence(details: PromptTokensDetails) -> str:
    """Return why part of the prompt was not served from the cache; empty if there is no miss."""
    miss = details.report().miss
    if miss is None:
        return ""
    sentences = {
        MissReason.FIRST_TIME: "",
        MissReason.DIVERGED: f"text changed at token {miss.position:,}",
        MissReason.REMOVED: f"the template removed text at token {miss.position:,}",
        MissReason.EVICTED: f"evicted from token {miss.position:,} on",
        MissReason.RECOMPUTED: f"prefilled from token {miss.position:,} on, which was faster than reading",
    }
    quoted = f": “{miss.was}” became “{miss.now}”" if miss.was or miss.now else ""
    sentence = sentences.get(miss.reason, "prefilled again")
    return f"{sentence}{quoted}" if sentence else ""
