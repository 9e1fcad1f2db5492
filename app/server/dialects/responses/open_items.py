"""Items of a response while they are generated: the events at their start, for each delta, and at their end.

Each event has a new item object: an event that was sent must not change.
"""

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import UNSET
from msgspec.structs import replace

from app.server.dialects.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomInputDelta,
    CustomInputDone,
    ItemAdded,
    ItemDone,
    ItemEvent,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    SummaryDelta,
    SummaryDone,
    SummaryPartAdded,
    SummaryPartDone,
    TextDelta,
    TextDone,
)
from app.server.dialects.responses.output_items import (
    CustomToolCall,
    FunctionCall,
    ItemStatus,
    OutputMessage,
    OutputText,
    Reasoning,
    ReasoningText,
    SummaryText,
)
from app.server.usage import ReportedToken


class OpenItem(Protocol):
    """An item that is being generated."""

    def start(self) -> Iterator[ItemEvent]: ...

    def add_text(self, text: str, logprobs: Sequence[ReportedToken]) -> Iterator[ItemEvent]: ...

    def finish(self, status: ItemStatus) -> Iterator[ItemEvent]:
        """Return the last events of the item. The final one has the whole item."""


class OpenMessage:
    def __init__(self, index: int) -> None:
        self._index = index
        self._id = new_id("msg")
        self._texts: list[str] = []
        self._logprobs: list[ReportedToken] = []

    def start(self) -> Iterator[ItemEvent]:
        yield ItemAdded(output_index=self._index, item=OutputMessage(self._id))
        yield PartAdded(output_index=self._index, item_id=self._id, part=OutputText())

    def add_text(self, text: str, logprobs: Sequence[ReportedToken]) -> Iterator[ItemEvent]:
        self._texts.append(text)
        self._logprobs += logprobs
        yield TextDelta(output_index=self._index, item_id=self._id, delta=text, logprobs=list(logprobs))

    def finish(self, status: ItemStatus) -> Iterator[ItemEvent]:
        part = OutputText("".join(self._texts), logprobs=self._logprobs)
        yield TextDone(output_index=self._index, item_id=self._id, text=part.text, logprobs=part.logprobs)
        yield PartDone(output_index=self._index, item_id=self._id, part=part)
        yield ItemDone(output_index=self._index, item=OutputMessage(self._id, status, content=[part]))


class OpenReasoning:
    """Reasoning, reported as content."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._id = new_id("rs")
        self._texts: list[str] = []

    def start(self) -> Iterator[ItemEvent]:
        yield ItemAdded(output_index=self._index, item=Reasoning(self._id, content=[]))
        yield PartAdded(output_index=self._index, item_id=self._id, part=ReasoningText())

    def add_text(self, text: str, logprobs: Sequence[ReportedToken]) -> Iterator[ItemEvent]:
        self._texts.append(text)
        yield ReasoningDelta(output_index=self._index, item_id=self._id, delta=text)

    def finish(self, status: ItemStatus) -> Iterator[ItemEvent]:
        part = ReasoningText("".join(self._texts))
        yield ReasoningDone(output_index=self._index, item_id=self._id, text=part.text)
        yield PartDone(output_index=self._index, item_id=self._id, part=part)
        yield ItemDone(output_index=self._index, item=Reasoning(self._id, status, content=[part]))


class OpenSummary:
    """Reasoning, reported as its summary."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._id = new_id("rs")
        self._texts: list[str] = []

    def start(self) -> Iterator[ItemEvent]:
        yield ItemAdded(output_index=self._index, item=Reasoning(self._id))
        yield SummaryPartAdded(output_index=self._index, item_id=self._id, part=SummaryText())

    def add_text(self, text: str, logprobs: Sequence[ReportedToken]) -> Iterator[ItemEvent]:
        self._texts.append(text)
        yield SummaryDelta(output_index=self._index, item_id=self._id, delta=text)

    def finish(self, status: ItemStatus) -> Iterator[ItemEvent]:
        part = SummaryText("".join(self._texts))
        yield SummaryDone(output_index=self._index, item_id=self._id, text=part.text)
        yield SummaryPartDone(output_index=self._index, item_id=self._id, part=part)
        yield ItemDone(output_index=self._index, item=Reasoning(self._id, status, summary=[part]))


class OpenCall:
    """A call of a function."""

    def __init__(self, index: int, call_id: str, name: str, namespace: str | None) -> None:
        self._index = index
        self._item = FunctionCall(new_id("fc"), call_id, name, namespace=namespace or UNSET)
        self._texts: list[str] = []

    def start(self) -> Iterator[ItemEvent]:
        yield ItemAdded(output_index=self._index, item=self._item)

    def add_text(self, text: str, logprobs: Sequence[ReportedToken]) -> Iterator[ItemEvent]:
        self._texts.append(text)
        yield ArgumentsDelta(output_index=self._index, item_id=self._item.id, delta=text)

    def finish(self, status: ItemStatus) -> Iterator[ItemEvent]:
        item = replace(self._item, arguments="".join(self._texts), status=status)
        yield ArgumentsDone(output_index=self._index, item_id=item.id, name=item.name, arguments=item.arguments)
        yield ItemDone(output_index=self._index, item=item)


class OpenCustomCall:
    """A call of a custom tool. Its text is reported at the end: until then it is a part of a JSON object."""

    def __init__(self, index: int, call_id: str, name: str, namespace: str | None) -> None:
        self._index = index
        self._item = CustomToolCall(new_id("ctc"), call_id, name, namespace=namespace or UNSET)
        self._texts: list[str] = []

    def start(self) -> Iterator[ItemEvent]:
        yield ItemAdded(output_index=self._index, item=self._item)

    def add_text(self, text: str, logprobs: Sequence[ReportedToken]) -> Iterator[ItemEvent]:
        self._texts.append(text)
        yield from ()

    def finish(self, status: ItemStatus) -> Iterator[ItemEvent]:
        item = replace(self._item, input=_input_text("".join(self._texts)), status=status)
        if item.input:
            yield CustomInputDelta(output_index=self._index, item_id=item.id, delta=item.input)
        yield CustomInputDone(output_index=self._index, item_id=item.id, input=item.input)
        yield ItemDone(output_index=self._index, item=item)


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _input_text(arguments: str) -> str:
    """Return the string in the arguments; if they have another form, the arguments themselves."""
    try:
        match json.loads(arguments):
            case {"input": str(text)}:
                return text
    except ValueError:
        pass
    return arguments
