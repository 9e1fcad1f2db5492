"""The items that replies are made of, as the Responses API writes them."""

from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, field

from app.server.usage import ReportedToken

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[str] = field(default_factory=list)  # never any
    logprobs: list[ReportedToken] = field(default_factory=list)  # where they were asked for


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
    """What the model thinks: as its content, or where a summary was asked for, as that, since there is no other."""

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
