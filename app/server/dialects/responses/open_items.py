"""An item of a response while it comes: what is told when it begins, goes on and ends.

Every event has an item of its own: what was told is not changed any more. Refuses to know what makes an item begin.
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
    """Of any kind."""

    def start(self) -> Iterator[ItemEvent]: ...

    def add_text(self, text: str, logprobs: Sequence[ReportedToken]) -> Iterator[ItemEvent]: ...

    def finish(self, status: ItemStatus) -> Iterator[ItemEvent]:
        """The last of these events has the whole item."""


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
    """Told as they are."""

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
    """Thoughts, told as their own summary."""

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
    """A call of a custom tool, whose one text is told when all of it is there: until then it is a part of JSON."""

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
    """The one text of a call; all that there is, where that is something else."""
    try:
        match json.loads(arguments):
            case {"input": str(text)}:
                return text
    except ValueError:
        pass
    return arguments
