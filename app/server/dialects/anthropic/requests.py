"""Requests of Anthropic's API: every supported field, with its type and its bounds.

`fields.py` lists all documented fields.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from app.generation.conversation import Conversation, Message
from app.generation.grammars import RequestedGrammar
from app.generation.options import API_DEFAULTS, DefaultSampling, GenerationOptions
from app.server.dialects.anthropic.blocks import (
    InputMessages,
    SystemPrompt,
    attachments_of,
    messages_of,
    system_texts,
)
from app.server.dialects.anthropic.changing_lines import ChangingLines
from app.server.dialects.anthropic.tools import Thinking, ToolChoice, ToolDefinitions, calls_are_parallel, tool_options
from app.server.http.errors import InvalidRequest, raise_first
from app.server.origin import OriginFields, Purpose
from app.server.request_fields import Count, Fraction, ModelName, StopText, Temperature
from app.server.structured_output import only_grammar, schema_grammar
from engine.sampling_params import MAX_STOPS, SamplingParams


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class TokenCountRequest(Struct, kw_only=True):
    """POST /v1/messages/count_tokens, with the fields that determine the prompt."""

    model: ModelName | None = None
    messages: InputMessages
    system: SystemPrompt | None = None
    tools: ToolDefinitions | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # older name of output_config.format

    def grammar(self) -> RequestedGrammar | None:
        """Return the grammar of the reply. Raises InvalidRequest if it is invalid or if there are two."""
        return only_grammar(self._grammars())

    def conversation(self, lines: ChangingLines) -> Conversation:
        """Convert the request to a conversation, without the lines that `lines` removes.

        Raises InvalidRequest naming the part that cannot be converted.
        """
        messages, reply_prefix = self._messages_and_reply_start()
        first_system = [messages.pop(0).content] if messages and messages[0].role == "system" else []
        system = lines.remove_from([*system_texts(self.system), *first_system])
        tools = tool_options(self.tools or (), self.tool_choice)
        raise_first((*self._problems(), *tools.problems()))
        thinking = (self.thinking or Thinking()).options(self.output_config.effort if self.output_config else None)
        return Conversation(
            [*([Message("system", "\n".join(system.texts))] if system.texts else ()), *messages],
            tools.tools,
            tools.allowed,
            tools.use,
            parallel_calls=calls_are_parallel(self.tool_choice),
            thinking_budget=thinking.budget,
            variables=thinking.template_variables(),
            reply_prefix=reply_prefix,
            attachments=[*attachments_of(self.system, self.messages)],
            removed_lines=system.left_out,
        )

    def _messages_and_reply_start(self) -> tuple[list[Message], str]:
        """Return the messages, and the start of the reply if the last message is the assistant's."""
        messages = messages_of(self.messages)
        if not messages or messages[-1].role != "assistant":
            return messages, ""
        last = messages.pop()
        if last.tool_calls or last.reasoning:
            problem = "a tool call or thinking cannot be continued; end the messages with a user message."
            raise InvalidRequest(f"messages: {problem}", parameter="messages")
        return messages, last.content

    def _problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) pairs for problems that the bounds of single fields cannot express."""
        if self.messages[-1].role == "assistant" and any(self._grammars()):
            yield (
                "messages",
                "the last message cannot be from the assistant if an output format is set; remove one of them.",
            )

    def _grammars(self) -> Iterator[RequestedGrammar]:
        if self.output_config is not None and self.output_config.format is not None:
            yield schema_grammar(self.output_config.format.schema, "output_config.format.schema")
        if self.output_format is not None:
            yield schema_grammar(self.output_format.schema, "output_format.schema")


class MessageRequest(TokenCountRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Count  # 0: only prefill; the reply is empty
    stream: bool | None = None
    temperature: Temperature | None = None
    top_k: Count | None = None
    top_p: Fraction | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    service_class: Literal["interactive", "normal", "background"] | None = None  # an extension of this server

    def generation_options(self, sampling: DefaultSampling = API_DEFAULTS) -> GenerationOptions:
        """Return the options of the reply. `sampling` sets values that the request leaves open.

        Raises InvalidSampling, and InvalidRequest for an invalid grammar.
        """
        candidates = [self._sampling(sampling)]
        return GenerationOptions(candidates, grammar=self.grammar(), returns_text=self.max_tokens > 0)

    def origin_fields(self) -> OriginFields:
        return OriginFields(Purpose.CHAT, service_class=self.service_class)

    def _sampling(self, defaults: DefaultSampling) -> SamplingParams:
        fields = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        given = {name: value for name, value in fields.items() if value is not None}
        stop = tuple(self.stop_sequences or ())
        return SamplingParams(**defaults.fill(given), max_tokens=max(1, self.max_tokens), stop=stop)
