"""Events of a streamed response. Each is named by its type. Sequence numbers start at 0."""

from typing import TypeAlias

from msgspec import Struct

from app.server.dialects.responses.output_items import OutputItem, OutputText, ReasoningText, SummaryText
from app.server.dialects.responses.response import Response
from app.server.usage import ReportedToken


class _Event(Struct, kw_only=True, tag_field="type"):
    sequence_number: int = 0  # set when the event is written


class _OfResponse(_Event, kw_only=True):
    response: Response


class Created(_OfResponse, kw_only=True, tag="response.created"):
    pass


class Queued(_OfResponse, kw_only=True, tag="response.queued"):
    pass


class InProgress(_OfResponse, kw_only=True, tag="response.in_progress"):
    pass


class Completed(_OfResponse, kw_only=True, tag="response.completed"):
    pass


class Incomplete(_OfResponse, kw_only=True, tag="response.incomplete"):
    pass


class Failed(_OfResponse, kw_only=True, tag="response.failed"):
    pass


class Error(_Event, kw_only=True, tag="error"):
    """The error that ended a stream. It is sent after the failed response, for clients that read only this event."""

    code: str
    message: str
    param: str | None


class _OfItem(_Event, kw_only=True):
    output_index: int


class ItemAdded(_OfItem, kw_only=True, tag="response.output_item.added"):
    item: OutputItem


class ItemDone(_OfItem, kw_only=True, tag="response.output_item.done"):
    item: OutputItem


class _InItem(_OfItem, kw_only=True):
    item_id: str


class _OfContent(_InItem, kw_only=True):
    content_index: int = 0  # always 0, because an item has one part


class PartAdded(_OfContent, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_OfContent, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(_OfContent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ReportedToken]


class TextDone(_OfContent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ReportedToken]


class ReasoningDelta(_OfContent, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_OfContent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class _OfSummary(_InItem, kw_only=True):
    summary_index: int = 0


class SummaryPartAdded(_OfSummary, kw_only=True, tag="response.reasoning_summary_part.added"):
    part: SummaryText


class SummaryPartDone(_OfSummary, kw_only=True, tag="response.reasoning_summary_part.done"):
    part: SummaryText


class SummaryDelta(_OfSummary, kw_only=True, tag="response.reasoning_summary_text.delta"):
    delta: str


class SummaryDone(_OfSummary, kw_only=True, tag="response.reasoning_summary_text.done"):
    text: str


class ArgumentsDelta(_InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_InItem, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomInputDelta(_InItem, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomInputDone(_InItem, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


ItemEvent: TypeAlias = (
    ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | SummaryPartAdded
    | SummaryPartDone
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
)
Event: TypeAlias = Created | Queued | InProgress | ItemEvent | Completed | Incomplete | Failed | Error
