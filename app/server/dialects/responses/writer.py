"""Writes the events of a response, and the response itself, from the events of the service.

The last event has the whole response, so a stream and a whole reply cannot disagree.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from app.generation.events import (
    Batch,
    ChatEvent,
    PromptLogprobs,
    PromptProgress,
    ReasoningDelta,
    ReplyEnd,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from app.server.dialects.openai.errors import error_body
from app.server.dialects.responses.events import (
    Completed,
    Created,
    Error,
    Event,
    Failed,
    Incomplete,
    InProgress,
    ItemDone,
    Queued,
)
from app.server.dialects.responses.open_items import (
    OpenCall,
    OpenCustomCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
    OpenSummary,
)
from app.server.dialects.responses.output_items import ItemStatus, OutputItem
from app.server.dialects.responses.response import Response, ResponseError
from app.server.dialects.responses.tools import OfferedTools
from app.server.usage import ReportedToken, reported_tokens
from app.text.tokenizer import Tokenizer
from engine.request import FinishReason

EventT = TypeVar("EventT", bound=Event)

NUM_QUEUE_EVENTS = 2


def queue_events(response: Response) -> Sequence[Event]:
    """Return the first events of a response that waits for the engine, or for its model."""
    return Created(response=response), Queued(sequence_number=1, response=response)


class ResponseWriter:
    """Writes one response. `response` is its current state."""

    def __init__(
        self,
        response: Response,
        tools: OfferedTools,
        tokenizer: Tokenizer,
        *,
        reports_summary: bool = False,
        num_events: int = 0,
    ) -> None:
        """Start to write a response, of which `num_events` events have been sent already."""
        self.response = response
        self.counts = TokenCounts()  # filled by the service
        self._tools = tools
        self._tokenizer = tokenizer
        self._reasoning_item = OpenSummary if reports_summary else OpenReasoning
        self._open: OpenItem | None = None
        self._output: list[OutputItem] = []
        self._num_events = num_events
        self._in_progress = False

    @property
    def has_started(self) -> bool:
        return self._num_events > 0

    def write(self, batch: Batch) -> list[Event]:
        """Return the events for a batch. The first call starts the response, and the end of the reply finishes it."""
        events = [] if self._in_progress else [*self.start()]
        return events + [written_event for _, event in batch for written_event in self._write(event)]

    def queue(self) -> Iterator[Event]:
        """Return the first events of a background response, which waits for the engine."""
        yield from map(self._numbered, queue_events(self.response))

    def start(self) -> Iterator[Event]:
        self._in_progress = True
        if not self.has_started:
            yield self._numbered(Created(response=self.response))
        self.response = self.response.started()
        yield self._numbered(InProgress(response=self.response))

    def finish(self, *, cut_off: bool = False) -> Iterator[Event]:
        status: ItemStatus = "incomplete" if cut_off else "completed"
        yield from self._finish_item(status)
        self.response = self.response.ended(status, self._output, self.counts)
        yield self._numbered((Incomplete if cut_off else Completed)(response=self.response))

    def fail(self, error: Exception) -> list[Event]:
        """Finish the response with an error."""
        detail = error_body(error).error
        closing = [*self._finish_item("incomplete")]
        self.response = self.response.failed(self._output, ResponseError(detail.code or detail.type, detail.message))
        return [*closing, self._numbered(Failed(response=self.response))]

    def cancel(self) -> None:
        """Finish a canceled response. Clients get no events about the end."""
        [*_] = self._finish_item("incomplete")
        self.response = self.response.cancelled(self._output)

    def error(self, error: Exception) -> Event:
        detail = error_body(error).error
        return self._numbered(Error(code=detail.code or detail.type, message=detail.message, param=detail.param))

    def _write(self, event: ChatEvent) -> Iterator[Event]:
        match event:
            case TextDelta("", ()):
                pass
            case TextDelta(text, logprobs):
                if not isinstance(self._open, OpenMessage):
                    yield from self._start_item(OpenMessage)
                yield from self._add_text(text, reported_tokens(self._tokenizer, logprobs))
            case ReasoningDelta(text):
                if not isinstance(self._open, self._reasoning_item):
                    yield from self._start_item(self._reasoning_item)
                yield from self._add_text(text)
            case ToolCallStart(_, call_id, name):
                yield from self._start_item(partial(self._new_call, call_id=call_id, name=name))
            case ToolCallDelta(_, arguments):
                yield from self._add_text(arguments)
            case ToolCallEnd():
                yield from self._finish_item("completed")
            case ReplyEnd(finish):
                if self._open is None and not self._output:  # the reply is empty
                    yield from self._start_item(OpenMessage)
                yield from self.finish(cut_off=finish is FinishReason.LENGTH)
            case PromptProgress() | PromptLogprobs():
                pass

    def _new_call(self, index: int, *, call_id: str, name: str) -> OpenItem:
        offered = self._tools.find(name)
        if offered is None:
            return OpenCall(index, call_id, name, None)
        kind = OpenCustomCall if offered.is_custom else OpenCall
        return kind(index, call_id, offered.name, offered.namespace)

    def _start_item(self, new_item: Callable[[int], OpenItem]) -> Iterator[Event]:
        """Finish the open item and start the next one. `new_item` takes its index."""
        yield from self._finish_item("completed")
        self._open = new_item(len(self._output))
        yield from map(self._numbered, self._open.start())

    def _add_text(self, text: str, logprobs: Sequence[ReportedToken] = ()) -> Iterator[Event]:
        if self._open is not None:
            yield from map(self._numbered, self._open.add_text(text, logprobs))

    def _finish_item(self, status: ItemStatus) -> Iterator[Event]:
        if self._open is not None:
            for event in self._open.finish(status):
                if isinstance(event, ItemDone):
                    self._output.append(event.item)
                yield self._numbered(event)
            self._open = None

    def _numbered(self, event: EventT) -> EventT:
        event.sequence_number = self._num_events
        self._num_events += 1
        return event
