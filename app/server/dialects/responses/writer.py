"""What a model says becomes the events of a response, and the response itself when it has ended.

So the streamed reply and the whole one, which is the response of the last event, cannot disagree. Refuses to know where
the model's words come from.
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
    OpenSummary,
    OpenThoughts,
)
from app.server.dialects.responses.output_items import ItemStatus, OutputItem
from app.server.dialects.responses.response import Response, ResponseError
from app.server.dialects.responses.tools import OfferedTools
from app.server.usage import ReportedToken, reported_tokens
from app.text.tokenizer import Tokenizer
from engine.request import FinishReason

EventT = TypeVar("EventT", bound=Event)


class ResponseWriter:
    """Writes one response. `response` is how far it is."""

    def __init__(
        self, response: Response, tools: OfferedTools, tokenizer: Tokenizer, *, tells_summary: bool = False
    ) -> None:
        self.response = response
        self.counts = TokenCounts()  # to be filled by whoever generates
        self._tools = tools
        self._tokenizer = tokenizer
        self._thoughts = OpenSummary if tells_summary else OpenThoughts
        self._open: OpenItem | None = None
        self._output: list[OutputItem] = []
        self._told = 0  # events
        self._in_progress = False

    @property
    def has_begun(self) -> bool:
        return self._told > 0

    def write(self, batch: Batch) -> list[Event]:
        """What has come meanwhile. Begins the response, and ends it."""
        events = [] if self._in_progress else [*self.begin()]
        return events + [written for _, event in batch for written in self._write(event)]

    def queue(self) -> Iterator[Event]:
        """The first events of a response in the background, which waits for the engine."""
        yield self._numbered(Created(response=self.response))
        yield self._numbered(Queued(response=self.response))

    def begin(self) -> Iterator[Event]:
        self._in_progress = True
        if not self.has_begun:
            yield self._numbered(Created(response=self.response))
        self.response = self.response.started()
        yield self._numbered(InProgress(response=self.response))

    def end(self, *, cut_off: bool = False) -> Iterator[Event]:
        status: ItemStatus = "incomplete" if cut_off else "completed"
        yield from self._close(status)
        self.response = self.response.ended(status, self._output, self.counts)
        yield self._numbered((Incomplete if cut_off else Completed)(response=self.response))

    def fail(self, error: Exception) -> list[Event]:
        """Its end, where something went wrong."""
        told = error_body(error).error
        closing = [*self._close("incomplete")]
        self.response = self.response.failed(self._output, ResponseError(told.code or told.type, told.message))
        return [*closing, self._numbered(Failed(response=self.response))]

    def cancel(self) -> None:
        """Its end, where nobody is told of it."""
        [*_] = self._close("incomplete")
        self.response = self.response.cancelled(self._output)

    def error(self, error: Exception) -> Event:
        told = error_body(error).error
        return self._numbered(Error(code=told.code or told.type, message=told.message, param=told.param))

    def _write(self, event: ChatEvent) -> Iterator[Event]:
        match event:
            case TextDelta("", ()):
                pass
            case TextDelta(text, logprobs):
                if not isinstance(self._open, OpenMessage):
                    yield from self._switch(OpenMessage)
                yield from self._add(text, reported_tokens(self._tokenizer, logprobs))
            case ReasoningDelta(text):
                if not isinstance(self._open, self._thoughts):
                    yield from self._switch(self._thoughts)
                yield from self._add(text)
            case ToolCallStart(_, call_id, name):
                yield from self._switch(partial(self._call, call_id=call_id, name=name))
            case ToolCallDelta(_, arguments):
                yield from self._add(arguments)
            case ToolCallEnd():
                yield from self._close("completed")
            case ReplyEnd(finish):
                if self._open is None and not self._output:  # nothing was said
                    yield from self._switch(OpenMessage)
                yield from self.end(cut_off=finish is FinishReason.LENGTH)
            case PromptProgress() | PromptLogprobs():
                pass

    def _call(self, index: int, *, call_id: str, name: str) -> OpenItem:
        offered = self._tools.find(name)
        if offered is None:
            return OpenCall(index, call_id, name, None)
        kind = OpenCustomCall if offered.is_custom else OpenCall
        return kind(index, call_id, offered.name, offered.namespace)

    def _switch(self, new_item: Callable[[int], OpenItem]) -> Iterator[Event]:
        """Whatever is open ends before the next item begins, which is made for its place."""
        yield from self._close("completed")
        self._open = new_item(len(self._output))
        yield from map(self._numbered, self._open.begin())

    def _add(self, text: str, logprobs: Sequence[ReportedToken] = ()) -> Iterator[Event]:
        if self._open is not None:
            yield from map(self._numbered, self._open.add(text, logprobs))

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        if self._open is not None:
            for event in self._open.end(status):
                if isinstance(event, ItemDone):
                    self._output.append(event.item)
                yield self._numbered(event)
            self._open = None

    def _numbered(self, event: EventT) -> EventT:
        event.sequence_number = self._told
        self._told += 1
        return event
