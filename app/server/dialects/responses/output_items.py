"""Output items of responses."""

from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, field

from app.server.usage import ReportedToken

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[str] = field(default_factory=list)  # always empty
    logprobs: list[ReportedToken] = field(default_factory=list)  # empty unless the request asks for them


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str = ""


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    text: str = ""


Part: TypeAlias = OutputText | ReasoningText | SummaryText


class OutputMessage(Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = field(default_factory=list)


class Reasoning(Struct, tag_field="type", tag="reasoning"):
    """The reasoning: as content, or as summary if the request asks for one. The summary is the whole reasoning."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[SummaryText] = field(default_factory=list)
    content: list[ReasoningText] | UnsetType = UNSET


class FunctionCall(Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"
    namespace: str | UnsetType = UNSET


class CustomToolCall(Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str = ""
    status: ItemStatus = "in_progress"
    namespace: str | UnsetType = UNSET


OutputItem: TypeAlias = OutputMessage | Reasoning | FunctionCall | CustomToolCall
