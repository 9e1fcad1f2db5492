"""Client of a running ingle server: chat replies as chat events, health, and models.

Uses the OpenAI API over loopback. Imports neither torch nor a tokenizer.
"""

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import msgspec

from app.client.http import HTTPClient, Remedies, ServerUnreachable, default_sampling_of, error_of
from app.generation.cache_report import EMPTY_REPORT, PromptTokensDetails
from app.generation.conversation import Message
from app.generation.events import ChatEvent, ReasoningDelta, ReplyEnd, TextDelta
from app.process.instance import Instance
from engine.request import FinishReason
from engine.sampling_params import SamplingParams

_ANSWER_SECONDS = 5.0
_REMEDIES = Remedies(unreachable="ingle ps")

# Fields that each request sets, so that the defaults of the server do not apply.
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


@dataclass(frozen=True, slots=True)
class Health:
    """The health report of a server. `problem` is empty while the server can serve."""

    problem: str
    running: int
    waiting: int
    running_by_class: Mapping[str, int]
    waiting_by_class: Mapping[str, int]
    kv_blocks: int
    kv_blocks_held: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Progress of the prefill of one prompt."""

    client: str  # name that the client gives in its requests
    done: int  # number of prefilled tokens
    total: int


class Client:
    """Client of one server, and a context manager. Its exit closes the connections, which aborts their requests."""

    def __init__(self, instance: Instance, key: str | None = None) -> None:
        """Create the client. `key`: the API key of the server; None: it needs none."""
        self._instance = instance
        self._http = HTTPClient(instance.url, key, _REMEDIES, answer_seconds=_ANSWER_SECONDS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def health(self) -> Health:
        """Return the health report. Raises ServerUnreachable or ServerError."""
        answer = await self._get("/health", accepted=(HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE))
        with self._http.parsing_response():
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
        """Return the progress of each prompt in prefill; an empty list if the server's model generates no text.

        Raises ServerUnreachable or ServerError.
        """
        answer = await self._get("/inglenook/engine", accepted=(HTTPStatus.OK, HTTPStatus.NOT_FOUND))
        with self._http.parsing_response():
            return [
                Reading(str(one["client"]), int(one["prompt_done"]), int(one["prompt_total"]))
                for one in answer.get("requests", ())
                if one["phase"] == "reading"
            ]

    async def default_sampling(self) -> Mapping[str, float] | None:
        """Return the sampling that the server applies by default.

        None if each API has other defaults, or the server is of an older version. Raises ServerUnreachable or
        ServerError.
        """
        answer = await self._get("/v1/models")
        with self._http.parsing_response():
            return next(
                map(default_sampling_of, (it for it in answer["data"] if it["id"] == self._instance.model)), None
            )

    async def stream_chat(self, messages: Sequence[Message], params: SamplingParams) -> AsyncGenerator[ChatEvent]:
        """Yield the reply to a conversation, in the events of the chat service, without logprobs.

        The client measures the times. Closing the generator closes the connection, which aborts the reply. Raises
        ServerUnreachable, ServerError, PromptTooLong, or ModelNotFound.
        """
        reply = _Reply(params.seed)
        body = _request(self._instance.model, messages, params)
        async with aclosing(self._http.stream(f"{self._instance.url}/v1/chat/completions", body)) as chunks:
            async for chunk in chunks:
                with self._http.parsing_response():
                    events = reply.events(chunk)
                for event in events:
                    yield event
        yield reply.end()

    async def _get(self, path: str, accepted: Sequence[int] = (HTTPStatus.OK,)) -> Any:
        return await self._http.ask("GET", f"{self._instance.url}{path}", accepted=accepted)


def _request(model: str, messages: Sequence[Message], params: SamplingParams) -> dict[str, object]:
    given = {name: getattr(params, name) for name in _SAMPLING_FIELDS}
    # the JSON field is a signed 64-bit integer
    given["seed"] = params.seed if params.seed < 1 << 63 else params.seed - (1 << 64)
    given["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    return {
        "model": model,
        "service_class": "interactive",  # the user waits for the answer
        "messages": [_wire_message(message) for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: value for name, value in given.items() if value not in (None, (), {})},
    }


def _wire_message(message: Message) -> dict[str, object]:
    """Return a message in the form of the OpenAI API, in which the arguments of a tool call are JSON text."""
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


class _Reply:
    """Converts the chunks of a streamed completion to chat events."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._started = time.monotonic()
        self._first_token_at = 0.0
        self._finish: FinishReason | None = None
        self._usage: Mapping[str, Any] = {}
        self._cache = EMPTY_REPORT

    def events(self, chunk: Any) -> list[ChatEvent]:
        if "error" in chunk:
            raise error_of(chunk["error"])
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
            raise ServerUnreachable("the server ended the reply before it was complete", "Try again.")
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
