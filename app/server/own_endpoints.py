"""Routes of this server's own API, which the terminal chat uses: engine state, abort, stop, token counts, and
forgetting. `app.server.model_endpoints` has those about models.

A caller whose key has a separate cache sees and ends only requests with that key.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from app.generation.conversation import Conversation
from app.generation.service import ChatService
from app.generation.template import MAX_TEXT_CHARS
from app.generation.token_streams import SuspendedReplies, TokenStreams
from app.models.decode_rate import decode_rate
from app.server.dialects.openai.chat_requests import ChatMessage, TemplateVariables
from app.server.http.endpoint import Endpoint
from app.server.http.reply import json_reply
from app.server.http.request_body import read_body
from app.server.machine import AmountReport, Machine
from app.server.origin import caller_origin, may_see
from app.server.request_fields import ModelName
from app.server.served_models import ServedModels
from engine.counters import Counters
from engine.request import FinishReason
from engine.request import Request as EngineRequest

Phase: TypeAlias = Literal["waiting", "reading", "writing", "preempted"]
Messages: TypeAlias = Annotated[list[ChatMessage], Meta(min_length=1)]


class RequestReport(Struct):
    """A request that has not ended."""

    id: str  # unique among all models
    model: str
    client: str  # the user agent
    service_class: str
    phase: Phase
    prompt_done: int  # computed and cached tokens of the prompt
    prompt_total: int
    reply_tokens: int
    seconds: float  # seconds since the request arrived
    reply: str = ""  # id by which a client can end the reply; empty: none


class TierReport(Struct):
    """One tier of the KV cache, in blocks."""

    name: str
    used: int
    total: int


class EngineReport(Struct):
    """State of the engine of one model, its machine, and the requests and counts of all models."""

    model: str
    context_length: int
    requests: list[RequestReport]  # of all models
    disk: AmountReport | None  # disk space of the KV cache of all models; null: the disk cache is off
    memory: int  # bytes of the process; 0: unknown
    gpu: AmountReport | None  # memory of the GPU that runs the engine; null: the engine runs on the CPU
    room: int  # bytes that another model could use instead of the loaded ones; 0: unknown
    tiers: list[TierReport] = msgspec.field(default_factory=list)  # empty: the model is not loaded
    block_bytes: int = 0  # approximate bytes of one block; 0: unknown
    computed_tokens: int = 0  # tokens of prompts and replies of all loaded models, since each was loaded
    generated_tokens: int = 0  # those of replies
    decode_rate: float = 0.0  # weight bytes per second of steps with one token; 0: unknown


class AbortRequest(Struct):
    """The id of the request to end."""

    id: Annotated[str, Meta(max_length=32)]


class Aborted(Struct):
    """Whether a request was aborted."""

    aborted: bool


class StopRequest(Struct):
    """The id in the chunks of the reply to end."""

    reply: Annotated[str, Meta(min_length=1, max_length=64)]


class Stopped(Struct):
    """Whether the reply was still being generated."""

    stopped: bool


class CountRequest(Struct):
    """A text, or a conversation whose next prompt is counted. Without a model, the default model counts."""

    text: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)] = ""
    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    chat_template_kwargs: TemplateVariables | None = None
    model: ModelName | None = None


class Count(Struct):
    tokens: int
    context_length: int


class ForgetRequest(Struct):
    """A conversation to delete, and conversations whose common prefixes must stay."""

    messages: Messages
    staying: Annotated[list[Messages], Meta(max_length=256)] = msgspec.field(default_factory=list)
    model: ModelName | None = None


class Forgotten(Struct):
    forgotten: bool = True


class OwnEndpoints:
    """Endpoints for the models of a server and the machine on which it runs."""

    def __init__(self, models: ServedModels, machine: Machine) -> None:
        self._models = models
        self._machine = machine
        self._abort_decoder = msgspec.json.Decoder(AbortRequest)
        self._stop_decoder = msgspec.json.Decoder(StopRequest)
        self._count_decoder = msgspec.json.Decoder(CountRequest)
        self._forget_decoder = msgspec.json.Decoder(ForgetRequest)

    def endpoints(self) -> list[Endpoint]:
        abort, stop = "Abort a request", "End a reply early; it still reports its usage"
        count, forget = "Count the tokens of a text or a conversation", "Delete the cached blocks of a chat"
        return [
            Endpoint("GET", "/inglenook/engine", self.report, "Report the state of the engine", gives=EngineReport),
            Endpoint("POST", "/inglenook/abort", self.abort, abort, takes=AbortRequest, gives=Aborted),
            Endpoint("POST", "/inglenook/stop", self.stop, stop, takes=StopRequest, gives=Stopped),
            Endpoint("POST", "/inglenook/count", self.count, count, takes=CountRequest, gives=Count),
            Endpoint("POST", "/inglenook/forget", self.forget, forget, takes=ForgetRequest, gives=Forgotten),
        ]

    async def report(self, request: Request) -> Response:
        """Report the model in the query, or the default model, and the requests of all models. Loads no model."""
        model = await self._models.describe(request.query_params.get("model"))
        service, loaded = model.service, model.resident.loaded
        report = EngineReport(
            model=model.name,
            context_length=model.context_length,
            requests=[
                _report(number, name, one, streams.now())
                for number, name, streams in self._streams_with_requests()
                for one in streams.requests()
                if may_see(request, one.origin)
            ],
            disk=await asyncio.to_thread(self._machine.disk),
            memory=_resident_bytes(),
            gpu=self._machine.gpu(),
            room=self._machine.room(),
            computed_tokens=sum(one.computed_tokens for one in self._counters()),
            generated_tokens=sum(one.generated_tokens for one in self._counters()),
        )
        if isinstance(service, ChatService) and loaded is not None:
            streams, state = service.streams, service.streams.state()
            report.tiers = [
                TierReport("device", state.kv_blocks_held + state.kv_blocks_cached, state.kv_blocks),
                TierReport("RAM", state.host_blocks_used, state.host_blocks),
            ]
            report.block_bytes = streams.block_bytes
            report.decode_rate = decode_rate(loaded.weight_bytes, state.decode_seconds)
        return json_reply(report)

    def _counters(self) -> Iterator[Counters]:
        return (streams.state().counters for _, _, streams in self._streams())

    def _streams(self) -> Iterator[tuple[int, str, TokenStreams]]:
        """Yield the number, the name, and the streams of each loaded model that generates text."""
        for number, resident in enumerate(self._models.residents):
            if resident.loaded is not None and isinstance(service := resident.loaded.service, ChatService):
                yield number, service.name, service.streams

    def _streams_with_requests(self) -> Iterator[tuple[int, str, TokenStreams]]:
        """Yield the number, the name, and the streams of each model that is loaded, or has suspended requests."""
        yield from self._streams()
        for number, resident in enumerate(self._models.residents):
            if isinstance(resident.suspended, SuspendedReplies):
                yield number, resident.title, resident.suspended.streams

    async def abort(self, request: Request) -> Response:
        body = await read_body(request, self._abort_decoder)
        return json_reply(Aborted(self._end_requests(request, lambda name, _: name == body.id, FinishReason.ABORT)))

    async def stop(self, request: Request) -> Response:
        body = await read_body(request, self._stop_decoder)
        return json_reply(
            Stopped(self._end_requests(request, lambda _, one: one.origin.reply == body.reply, FinishReason.STOP))
        )

    def _end_requests(
        self, request: Request, is_meant: Callable[[str, EngineRequest], bool], reason: FinishReason
    ) -> bool:
        """End requests that match and that the caller may see. Returns whether there were any."""
        found = [
            (streams, one.id)
            for number, _, streams in self._streams_with_requests()
            for one in streams.requests()
            if is_meant(_id_of(number, one), one) and may_see(request, one.origin)
        ]
        for streams, request_id in found:
            streams.end(request_id, reason)
        return bool(found)

    async def count(self, request: Request) -> Response:
        """Count tokens, even if there are more than the context holds. Raises InvalidMessage and TemplateError."""
        body = await read_body(request, self._count_decoder)
        service = (await self._models.chat(request, body.model)).service
        if body.messages:
            messages = [message.to_message() for message in body.messages]
            conversation = Conversation(messages, variables=dict(body.chat_template_kwargs or {}))
            tokens = await service.count_tokens(conversation)
        else:
            tokens = len(await service.tokenize(body.text))
        return json_reply(Count(tokens, service.context_length))

    async def forget(self, request: Request) -> Response:
        body = await read_body(request, self._forget_decoder)
        gone = [message.to_message() for message in body.messages]
        staying = [[message.to_message() for message in other] for other in body.staying]
        service = (await self._models.chat(request, body.model)).service
        await service.forget(gone, staying, caller_origin(request))
        return json_reply(Forgotten())


def _id_of(number: int, request: EngineRequest) -> str:
    """Return the id of a request. The ids of an engine are unique only among its own requests."""
    return f"{number}.{request.id}"


def _report(number: int, model: str, request: EngineRequest, now: float) -> RequestReport:
    total = len(request.prompt_ids)
    return RequestReport(
        id=_id_of(number, request),
        model=model,
        client=request.origin.client,
        service_class=request.origin.service.name.lower(),
        phase=_phase(request),
        prompt_done=min(total, request.num_computed),
        prompt_total=total,
        reply_tokens=len(request.output_ids),
        seconds=round(max(0.0, now - request.queue.arrival), 3),
        reply=request.origin.reply,
    )


def _phase(request: EngineRequest) -> Phase:
    if not request.has_slot:
        return "preempted" if request.num_preemptions or request.output_ids else "waiting"
    return "writing" if request.output_ids else "reading"


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 on systems other than Linux."""
    if sys.platform != "linux":
        return 0
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
