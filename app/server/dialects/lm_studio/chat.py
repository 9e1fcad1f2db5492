"""LM Studio's own chat: the events of a response of the Responses API, in LM Studio's format.

The last event has the whole reply, so a stream and a whole reply cannot disagree.
"""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from app.generation.events import TokenCounts
from app.server.dialects.lm_studio.errors import ErrorBody, ErrorDetail, error_body
from app.server.dialects.responses import events, output_items
from app.server.dialects.responses.input_items import InputItem
from app.server.dialects.responses.replies import ResponseReply
from app.server.dialects.responses.response import Response
from app.server.http.endpoint import NAMED_EVENTS
from app.server.http.holds import EarlyEvents, Wait
from app.server.served_models import ServedModels
from app.server.usage import timings_of


class Message(Struct, tag_field="type", tag="message"):
    content: str


class Reasoning(Struct, tag_field="type", tag="reasoning"):
    content: str


class Stats(Struct, kw_only=True):
    input_tokens: int
    total_output_tokens: int
    reasoning_output_tokens: int
    tokens_per_second: float
    time_to_first_token_seconds: float
    # parts of the request that the prompt lacks: numbers of images
    left_out: list[str] | UnsetType = UNSET


class ChatReply(Struct, kw_only=True):
    """The whole reply."""

    model_instance_id: str
    output: list[Message | Reasoning]
    stats: Stats
    response_id: str | UnsetType = UNSET  # set if the chat is stored


class _Event(Struct, kw_only=True, tag_field="type"):
    pass


class ChatStart(_Event, kw_only=True, tag="chat.start"):
    model_instance_id: str


class ModelLoadStart(_Event, kw_only=True, tag="model_load.start"):
    model_instance_id: str


class ModelLoadProgress(_Event, kw_only=True, tag="model_load.progress"):
    model_instance_id: str
    progress: float  # from 0 to 1


class ModelLoadEnd(_Event, kw_only=True, tag="model_load.end"):
    model_instance_id: str
    load_time_seconds: float


class PromptStart(_Event, kw_only=True, tag="prompt_processing.start"):
    pass


class PromptEnd(_Event, kw_only=True, tag="prompt_processing.end"):
    pass


class ReasoningStart(_Event, kw_only=True, tag="reasoning.start"):
    pass


class ReasoningDelta(_Event, kw_only=True, tag="reasoning.delta"):
    content: str


class ReasoningEnd(_Event, kw_only=True, tag="reasoning.end"):
    pass


class MessageStart(_Event, kw_only=True, tag="message.start"):
    pass


class MessageDelta(_Event, kw_only=True, tag="message.delta"):
    content: str


class MessageEnd(_Event, kw_only=True, tag="message.end"):
    pass


class Failure(_Event, kw_only=True, tag="error"):
    error: ErrorDetail


class ChatEnd(_Event, kw_only=True, tag="chat.end"):
    result: ChatReply


Event: TypeAlias = (
    ChatStart
    | ModelLoadStart
    | ModelLoadProgress
    | ModelLoadEnd
    | PromptStart
    | PromptEnd
    | ReasoningStart
    | ReasoningDelta
    | ReasoningEnd
    | MessageStart
    | MessageDelta
    | MessageEnd
    | Failure
    | ChatEnd
)


class LoadEvents(EarlyEvents):
    """Reports the load of a model for which a chat waits. `has_started` is true from its first event on."""

    seconds = 0.5

    def __init__(self, models: ServedModels, name: str | None) -> None:
        super().__init__(NAMED_EVENTS)
        self.has_started = False
        self._models = models
        self._name = name
        self._model = ""  # name in the events
        self._started_at = time.monotonic()

    async def opening(self) -> bytes:
        self._model = (await self._models.names.find(self._name)).reply_name
        self.has_started = True
        events = ChatStart(model_instance_id=self._model), ModelLoadStart(model_instance_id=self._model)
        return b"".join(map(NAMED_EVENTS.frame, events))

    def progress(self, wait: Wait) -> bytes:
        return NAMED_EVENTS.frame(ModelLoadProgress(model_instance_id=self._model, progress=wait.fraction))

    def closing(self) -> bytes:
        seconds = round(time.monotonic() - self._started_at, 3)
        return NAMED_EVENTS.frame(ModelLoadEnd(model_instance_id=self._model, load_time_seconds=seconds))

    def failure(self, error: msgspec.Raw) -> bytes:
        return NAMED_EVENTS.frame(Failure(error=msgspec.json.decode(error, type=ErrorBody).error))


def chat_events(
    reply: ResponseReply, earlier: Sequence[InputItem], *, has_started: bool = False
) -> AsyncGenerator[list[Event]]:
    """Yield the events of a reply in batches, without the first one if the chat `has_started`.

    Raises the errors of `ResponseReply.events`.
    """
    writer = _Writer(reply.writer.response.model, reply.writer.counts, has_started=has_started)
    return reply.events(earlier, lambda batch: [one for event in batch for one in writer.write(event)])


async def fold(chunks: AsyncGenerator[Event]) -> ChatReply:
    """Return the whole reply."""
    async for event in chunks:
        if isinstance(event, ChatEnd):
            return event.result
    raise EOFError("the events ended without a result")


def failure(error: Exception) -> Failure:
    """Return the event that ends a stream that failed."""
    return Failure(error=error_body(error).error)


class _Writer:
    """Writes the events of one reply."""

    def __init__(self, model: str, counts: TokenCounts, *, has_started: bool) -> None:
        self._model = model
        self._has_started = has_started
        self._counts = counts
        self._has_finished_prompt = False

    def write(self, event: events.Event) -> Iterator[Event]:
        match event:
            case events.Created():
                if not self._has_started:
                    yield ChatStart(model_instance_id=self._model)
                yield PromptStart()
            case events.ItemAdded(item=output_items.Reasoning()):
                yield from self._finish_prompt()
                yield ReasoningStart()
            case events.ItemAdded(item=output_items.OutputMessage()):
                yield from self._finish_prompt()
                yield MessageStart()
            case events.ReasoningDelta(delta=delta):
                yield ReasoningDelta(content=delta)
            case events.TextDelta(delta=delta):
                yield MessageDelta(content=delta)
            case events.ItemDone(item=output_items.Reasoning()):
                yield ReasoningEnd()
            case events.ItemDone(item=output_items.OutputMessage()):
                yield MessageEnd()
            case events.Completed(response=response) | events.Incomplete(response=response):
                yield from self._finish_prompt()
                yield ChatEnd(result=self._result(response))

    def _finish_prompt(self) -> Iterator[Event]:
        """Report once that the prompt was prefilled."""
        if not self._has_finished_prompt:
            self._has_finished_prompt = True
            yield PromptEnd()

    def _result(self, response: Response) -> ChatReply:
        counts = self._counts
        stats = Stats(
            input_tokens=counts.prompt,
            total_output_tokens=counts.completion,
            reasoning_output_tokens=counts.reasoning,
            tokens_per_second=timings_of(counts).predicted_per_second if counts.replies else 0.0,
            time_to_first_token_seconds=round(counts.first_token_seconds, 6) if counts.replies else 0.0,
            left_out=[*counts.cache.left_out] or UNSET,
        )
        response_id = response.id if response.store else UNSET
        return ChatReply(
            model_instance_id=self._model, output=[*_output_items(response)], stats=stats, response_id=response_id
        )


def _output_items(response: Response) -> Iterator[Message | Reasoning]:
    for item in response.output:
        match item:
            case output_items.OutputMessage(content=parts):
                yield Message("".join(part.text for part in parts))
            case output_items.Reasoning(content=[*reasoning]):
                yield Reasoning("".join(part.text for part in reasoning))
