"""Requests of the Responses API: every field that is read, with its type and its bounds.

`app.server.dialects.openai.requests` declares fields that OpenAI's other requests share. `fields.py` lists all
documented fields.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from app.generation.conversation import Conversation, ReasoningEffort, ThinkingOptions
from app.generation.grammars import ANY_OBJECT, RequestedGrammar
from app.server.dialects.openai.requests import GenerationRequest
from app.server.dialects.responses.input_items import MAX_ITEMS, InputItem, attachments_in, items_of, messages_of
from app.server.dialects.responses.tools import OfferedTools, ToolChoice, ToolDefinitions, qualified
from app.server.origin import Purpose
from app.server.request_fields import PositiveCount
from app.server.structured_output import Schema, schema_grammar

LOGPROBS = "message.output_text.logprobs"  # a value of `include`

ResponseId: TypeAlias = Annotated[str, Meta(max_length=128)]
Text64: TypeAlias = Annotated[str, Meta(max_length=64)]


class ReasoningOptions(Struct):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class TextFormat(Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class TextOptions(Struct):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseRequest(GenerationRequest, kw_only=True, dict=True):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    max_output_tokens: PositiveCount | None = None
    max_tool_calls: PositiveCount | None = None  # limits server-side tools, which this server does not have
    tools: ToolDefinitions | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    metadata: Annotated[dict[Text64, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # no effect: a prompt that is too long is refused
    background: bool | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None
    safety_identifier: Annotated[str, Meta(max_length=1024)] | None = None

    @cached_property
    def items(self) -> Sequence[InputItem]:
        """The input items, in the form in which they are stored."""
        return items_of(self.input)

    @cached_property
    def offered(self) -> OfferedTools:
        return OfferedTools(self.tools or ())

    @property
    def reports_summary(self) -> bool:
        """Whether reasoning is reported as its summary."""
        return self.reasoning is not None and self.reasoning.summary not in (None, "none")

    @property
    def reported_text(self) -> TextOptions:
        given = self.text or TextOptions()
        return TextOptions(given.format or TextFormat("text"), given.verbosity or "medium")

    @property
    def reported_choice(self) -> Any:
        return msgspec.to_builtins(self.tool_choice or "auto")

    def conversation_after(self, earlier: Sequence[InputItem]) -> Conversation:
        """Convert the request to a conversation that continues `earlier` items.

        Raises InvalidRequest naming the item that cannot be converted.
        """
        options = self.offered.options(self.tool_choice)
        thinking = ThinkingOptions.of(self.reasoning.effort if self.reasoning else None)
        return Conversation(
            messages_of(self.instructions, earlier, self.items, qualified),
            options.tools,
            options.allowed,
            options.use,
            parallel_calls=self.parallel_tool_calls,
            thinking_budget=thinking.budget,
            variables=thinking.template_variables(),
            attachments=[*attachments_in(self.input)],
        )

    @property
    def _format(self) -> TextFormat | None:
        return None if self.text is None else self.text.format

    def _purpose(self) -> Purpose:
        return Purpose.CHAT

    def _grammars(self) -> Iterator[RequestedGrammar]:
        text_format = self._format
        if text_format is not None and text_format.type == "json_schema" and text_format.schema is not None:
            yield schema_grammar(text_format.schema, "text.format.schema")
        elif text_format is not None and text_format.type == "json_object":
            yield RequestedGrammar(ANY_OBJECT, "text.format")
        yield from super()._grammars()

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from super()._problems()
        if self._format is not None and self._format.type == "json_schema" and self._format.schema is None:
            yield "text.format.schema", "it is required."
        if self.background and self.store is False:
            yield "background", "a background response must be stored; leave store out."
        yield from self.offered.problems()
        yield from self.offered.options(self.tool_choice).problems()

    def _max_tokens(self) -> int | None:
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    def _logprobs(self) -> int | None:
        included = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        return self.top_logprobs or 0 if included else None
