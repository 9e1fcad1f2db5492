"""Client of a running ingle server: chat replies as chat events, health, and models.

Uses the OpenAI API over loopback. Imports neither torch nor a tokenizer.
"""

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import msgspec
from msgspec import Struct, field

from app.client.http import HTTPClient, Remedies, ServerUnreachable, default_sampling_of, error_of, remedies_of
from app.generation.cache_report import EMPTY_REPORT, PromptTokensDetails
from app.generation.conversation import Message
from app.generation.events import ChatEvent, ReasoningDelta, ReplyEnd, TextDelta
from app.models.residency.ledger import Bytes
from app.process.instance import BoxInstance, Instance
from app.progress import Progress, StageProgress, Unit
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
class ActiveRequest:
    """A request that has not ended."""

    model: str
    phase: str  # waiting, reading (its prompt is in prefill), writing, or preempted
    client: str  # name that the client gives in its requests
    done: int  # number of prefilled tokens
    total: int
    reply: str = ""  # id by which it is stopped; empty: none
    reply_tokens: int = 0


class SeenRequest(Struct):
    """A request whose prompt has a nonce, as the server saw it."""

    path: str
    model: str
    status: int | None
    ended: bool  # whether the whole response was sent
    prompt_tokens: int
    cached_tokens: int
    max_tokens: int | None
    tools: int  # number of its tools
    tool_results: int
    completion_tokens: int


class ServerModel(Struct):
    """A model of a server, loaded or not."""

    name: str
    names: tuple[str, ...]
    kind: str
    state: str
    stage: str | None = None  # what its load is doing
    progress: float | None = None  # fraction of the stage that is done
    pinned: bool = False
    expires_in: float | None = None  # seconds until it is unloaded if no request uses it; None: it stays
    problem: str | None = None  # why it could not be loaded
    context_length: int | None = None
    tools: str = "none"  # how tools are presented to it: native, generic (as text), or none
    size: int | None = None  # bytes of its files
    memory: dict[str, Bytes] = field(default_factory=dict)

    @property
    def is_in_use(self) -> bool:
        """Whether it is loaded, loading, or has failed to load."""
        return self.state != "unloaded"


class MachineMemory(Struct):
    """One memory of the machine, in bytes."""

    available: int
    free: int  # bytes that another model could use
    promised: int  # bytes that all loaded models may use


class ServerModels(Struct):
    """The models of a server, and the memories of its machine."""

    models: list[ServerModel]
    memory: dict[str, MachineMemory] = field(default_factory=dict)


class ModelLoad(Struct):
    """One line about a load."""

    model: str
    state: str
    stage: str | None = None
    done: int = 0
    total: int | None = None
    unit: Unit = "bytes"
    seconds: float | None = None  # duration of the load; None until it is complete


class Client:
    """Client of one server, and a context manager. Its exit closes the connections, which aborts their requests."""

    def __init__(self, instance: Instance, key: str | None = None) -> None:
        """Create the client. `key`: the API key of the server; None: it needs none. A box gets its own key instead."""
        box = instance.box if isinstance(instance, BoxInstance) else None
        remedies = _REMEDIES if box is None else remedies_of(box)
        self._instance = instance
        self._http = HTTPClient(instance.url, key, remedies, answer_seconds=_ANSWER_SECONDS, box=box)

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

    async def requests(self) -> list[ActiveRequest]:
        """Return the requests of all models that generate text. Raises ServerUnreachable or ServerError."""
        answer = await self._get("/inglenook/engine", accepted=(HTTPStatus.OK, HTTPStatus.NOT_FOUND))
        with self._http.parsing_response():
            return [
                ActiveRequest(
                    str(one.get("model", self._instance.model)),
                    str(one["phase"]),
                    str(one["client"]),
                    int(one["prompt_done"]),
                    int(one["prompt_total"]),
                    str(one.get("reply", "")),
                    int(one.get("reply_tokens", 0)),
                )
                for one in answer.get("requests", ())
            ]

    async def seen(self, nonce: str) -> list[SeenRequest]:
        """Return the requests whose prompt has a nonce, the oldest first. Raises ServerUnreachable or ServerError."""
        answer = await self._get(f"/inglenook/seen?nonce={nonce}")
        with self._http.parsing_response():
            return msgspec.convert(answer["requests"], list[SeenRequest])

    async def stop(self, reply: str) -> None:
        """End a reply early. Raises ServerUnreachable or ServerError."""
        await self._http.ask("POST", f"{self._instance.url}/inglenook/stop", {"reply": reply})

    async def models(self) -> list[ServerModel]:
        """Return all models of the server. Raises ServerUnreachable or ServerError."""
        answer = await self._get("/inglenook/models")
        with self._http.parsing_response():
            return msgspec.convert(answer, ServerModels).models

    def load(
        self, model: str, *, pinned: bool | None = None, keep_alive: float | None = None
    ) -> AsyncGenerator[ModelLoad]:
        """Load a model, and yield the progress. `keep_alive`: seconds after its last use until it is unloaded.

        See `load_lines`.
        """
        return load_lines(self._http, self._instance.url, {"model": model, "pin": pinned, "ttl": keep_alive})

    async def load_with_progress(
        self,
        model: str,
        progress: Progress,
        *,
        pinned: bool | None = None,
        keep_alive: float | None = None,
    ) -> float:
        """Load a model and show the progress. Returns the seconds that it took. See `load`."""
        seconds = 0.0
        lines = self.load(model, pinned=pinned, keep_alive=keep_alive)
        async with aclosing(lines):
            with closing(StageProgress(progress)) as stages:
                async for line in lines:
                    if line.stage:
                        stages.show(line.stage, line.done, line.total, line.unit)
                    seconds = line.seconds or seconds
        return seconds

    async def unload(self, model: str | None) -> list[str]:
        """Unload a model, or all of them, once their requests have ended. Returns the names of those that were loaded.

        Raises ServerUnreachable, ModelNotFound, or ServerError.
        """
        body = {"all": True} if model is None else {"model": model}
        answer = await self._http.ask("POST", f"{self._instance.url}/inglenook/unload", body, waits=True)
        with self._http.parsing_response():
            return msgspec.convert(answer["unloaded"], list[str])

    async def default_sampling(self, model: str) -> Mapping[str, float] | None:
        """Return the sampling that the server applies by default to a model.

        None if each API has other defaults, or the server is of an older version. Raises ServerUnreachable,
        ModelNotFound, or ServerError.
        """
        answer = await self._get(f"/v1/models/{quote(model, safe='')}")
        with self._http.parsing_response():
            return default_sampling_of(answer)

    async def stream_chat(
        self, model: str, messages: Sequence[Message], params: SamplingParams
    ) -> AsyncGenerator[ChatEvent]:
        """Yield the reply of a model to a conversation, in the events of the chat service, without logprobs.

        The client measures the times. Closing the generator closes the connection, which aborts the reply. Raises
        ServerUnreachable, ServerError, PromptTooLong, or ModelNotFound.
        """
        reply = _Reply(params.seed)
        body = _request(model, messages, params)
        async with aclosing(self._http.stream(f"{self._instance.url}/v1/chat/completions", body)) as chunks:
            async for chunk in chunks:
                with self._http.parsing_response():
                    events = reply.events(chunk)
                for event in events:
                    yield event
        yield reply.end()

    async def _get(self, path: str, accepted: Sequence[int] = (HTTPStatus.OK,)) -> Any:
        return await self._http.ask("GET", f"{self._instance.url}{path}", accepted=accepted)


async def load_lines(http: HTTPClient, url: str, body: Mapping[str, object]) -> AsyncGenerator[ModelLoad]:
    """Request a load from the server at `url`, and yield the progress.

    Closing the generator stops the load if no other request waits for it. Raises ServerUnreachable, ModelNotFound, or
    ServerError.
    """
    async with aclosing(http.lines(f"{url}/inglenook/load", body)) as lines:
        async for line in lines:
            with http.parsing_response():
                if "error" in line:
                    raise error_of(line["error"])
                load = msgspec.convert(line, ModelLoad)
            yield load


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
