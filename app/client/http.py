"""A client of a running server of ours: its chat as chat events, its health, its models.

Speaks the OpenAI dialect over loopback; loads neither torch nor a tokenizer. Refuses to know how the server works.
"""

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from app.errors import AppError, ModelNotFound
from app.generation.cache_details import PromptTokensDetails
from app.generation.cache_report import NOTHING
from app.generation.events import ChatEvent, ReasoningDelta, ReplyEnd, TextDelta
from app.generation.messages import Message
from app.process.instance import Instance
from engine.errors import PromptTooLong
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from quant.errors import InglenookError

_ANSWER_SECONDS = 5.0  # for everything but the wait for tokens, which ends when the user ends it
_TIMEOUT = httpx.Timeout(_ANSWER_SECONDS, read=None)

# What the server is always told, so that its own defaults play no part.
_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
)

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
class Health:
    """What a server says of itself. `problem` is empty while it can serve."""

    problem: str
    running: int
    waiting: int
    running_by_class: Mapping[str, int]
    waiting_by_class: Mapping[str, int]
    kv_blocks: int
    kv_blocks_held: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt that a server reads."""

    client: str  # as it names itself
    done: int  # tokens
    total: int


class Client:
    """One server. Use it as a context manager; leaving it closes its connections, which ends what they asked for."""

    def __init__(self, instance: Instance, key: str | None = None) -> None:
        """`key` is the API key that it asks for; None: none."""
        self._instance = instance
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # What the environment says of proxies is for the way out of this machine.
        self._http = httpx.AsyncClient(base_url=instance.url, headers=headers, timeout=_TIMEOUT, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def health(self) -> Health:
        """Raises ServerUnreachable or ServerError."""
        answer = await self._get("/health", accepted=(httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE))
        with as_agreed():
            return Health(
                str(answer.get("reason", "")),
                int(answer["running"]),
                int(answer["waiting"]),
                dict(answer["running_by_class"]),
                dict(answer["waiting_by_class"]),
                int(answer["kv_blocks"]),
                int(answer["kv_blocks_held"]),
            )

    async def reading(self) -> list[Reading]:
        """The prompts that are being read; none of a model that writes no text. Raises ServerUnreachable or
        ServerError."""
        answer = await self._get("/inglenook/engine", accepted=(httpx.codes.OK, httpx.codes.NOT_FOUND))
        with as_agreed():
            return [
                Reading(str(one["client"]), int(one["prompt_done"]), int(one["prompt_total"]))
                for one in answer.get("requests", ())
                if one["phase"] == "reading"
            ]

    async def models(self) -> list[str]:
        """The ids of the models that it serves. Raises ServerUnreachable or ServerError."""
        answer = await self._get("/v1/models")
        with as_agreed():
            return [str(model["id"]) for model in answer["data"]]

    async def default_sampling(self) -> Mapping[str, float] | None:
        """What the server applies where a request leaves its sampling open; None if each API has its own defaults, or
        the server is of an older version. Raises ServerUnreachable or ServerError."""
        answer = await self._get("/v1/models")
        with as_agreed():
            return next(map(told_sampling, (it for it in answer["data"] if it["id"] == self._instance.model)), None)

    async def stream_chat(self, messages: Sequence[Message], params: SamplingParams) -> AsyncGenerator[ChatEvent]:
        """The reply to a conversation, as the chat service of this process would give it, without logprobs; times are
        measured here.

        Closing the generator closes the connection, which ends the reply. Raises ServerUnreachable, ServerError,
        PromptTooLong or ModelNotFound.
        """
        reply = _Reply(params.seed)
        body = _request(self._instance.model, messages, params)
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise refusal(response.status_code, await response.aread())
                async with aclosing(server_sent_data(response.aiter_bytes())) as chunks:
                    async for chunk in chunks:
                        with as_agreed():
                            events = reply.events(_parsed(chunk))
                        for event in events:
                            yield event
        except httpx.HTTPError as problem:
            raise self._unreachable(problem) from problem
        yield reply.end()

    async def _get(self, path: str, accepted: Sequence[int] = (httpx.codes.OK,)) -> Any:
        try:
            response = await self._http.get(path, timeout=_ANSWER_SECONDS)
        except httpx.HTTPError as problem:
            raise self._unreachable(problem) from problem
        if response.status_code not in accepted:
            raise refusal(response.status_code, response.content)
        return _parsed(response.content)

    def _unreachable(self, problem: httpx.HTTPError) -> ServerUnreachable:
        reason = str(problem) or type(problem).__name__
        return ServerUnreachable(f"the server at {self._instance.url} does not answer: {reason}", "ingle ps")


def told_sampling(model: Mapping[str, Any]) -> Mapping[str, float] | None:
    """What an entry of a server's list of models says of the sampling of requests that leave it open."""
    told = model.get("default_sampling")
    return None if told is None else msgspec.convert(told, dict[str, int | float])


def _request(model: str, messages: Sequence[Message], params: SamplingParams) -> dict[str, object]:
    given = {name: getattr(params, name) for name in _SAMPLING_FIELDS}
    given["seed"] = params.seed if params.seed < 1 << 63 else params.seed - (1 << 64)  # 64 bits, signed on the wire
    given["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    return {
        "model": model,
        "service_class": "interactive",  # whoever uses this client waits for the answer
        "messages": [_wire_message(message) for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: value for name, value in given.items() if value not in (None, (), {})},
    }


def _wire_message(message: Message) -> dict[str, object]:
    """A message in OpenAI's form, where the arguments of a tool call are JSON text."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in message.tool_calls
    ]
    optional = {
        "reasoning_content": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    given = {key: value for key, value in optional.items() if value}
    return {"role": message.role, "content": message.content, **given}


async def server_sent_data(parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """The data of each event, up to the closing [DONE]. Lines end at \\n alone: JSON may hold other separators."""
    unread = b""
    async for part in parts:
        *lines, unread = (unread + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                yield data


def _parsed(content: bytes) -> Any:
    with as_agreed():
        return json.loads(content)


@contextmanager
def as_agreed(remedy: str = "Stop it, and start it again.") -> Iterator[None]:
    """Reading an answer inside fails with ServerError where it is not what a server of ours says."""
    try:
        yield
    except _UNREADABLE as problem:
        raise ServerError("the server's answer makes no sense", remedy) from problem


def refusal(status: int, content: bytes) -> InglenookError:
    """The error that an error answer stands for."""
    try:
        return _error(json.loads(content)["error"])
    except _UNREADABLE:
        said = _brief(_said(content))
        return ServerError(f"the server answered with status {status}{f': {said}' if said else ''}")


def _error(error: Mapping[str, Any]) -> InglenookError:
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


class _Reply:
    """Folds the chunks of a streamed completion into chat events."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._started = time.monotonic()
        self._first_token_at = 0.0
        self._finish: FinishReason | None = None
        self._usage: Mapping[str, Any] = {}
        self._cache = NOTHING

    def events(self, chunk: Any) -> list[ChatEvent]:
        if "error" in chunk:
            raise _error(chunk["error"])
        if usage := chunk.get("usage"):
            self._usage = usage
            self._cache = msgspec.convert(usage.get("prompt_tokens_details") or {}, PromptTokensDetails).report()
        events: list[ChatEvent] = []
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta", {})
            if thought := delta.get("reasoning"):
                events.append(ReasoningDelta(thought))
            if text := delta.get("content"):
                events.append(TextDelta(text))
            if reason := choice.get("finish_reason"):
                self._finish = FinishReason.LENGTH if reason == "length" else FinishReason.STOP
        if events:
            self._first_token_at = self._first_token_at or time.monotonic()
        return events

    def end(self) -> ReplyEnd:
        if self._finish is None:
            raise ServerUnreachable("the server ended the answer before it was complete", "Try again.")
        now = time.monotonic()
        return ReplyEnd(
            finish=self._finish,
            stop=None,
            seed=self._seed,
            prompt_tokens=int(self._usage.get("prompt_tokens", 0)),
            cache=self._cache,
            completion_tokens=int(self._usage.get("completion_tokens", 0)),
            first_token_seconds=(self._first_token_at or now) - self._started,
            total_seconds=now - self._started,
        )
