"""Requests for chat completions through OpenAI's API: messages, tools, reasoning, and variables of the chat template.

`requests` declares the fields that other requests share with these.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from app.generation.attachments import Attachment
from app.generation.conversation import (
    MAX_TOOLS,
    Conversation,
    InvalidMessage,
    Message,
    ReasoningEffort,
    ThinkingBudget,
    ThinkingOptions,
    Tool,
    ToolCall,
    ToolName,
    ToolOptions,
    ToolUse,
    function_tool,
)
from app.generation.grammars import RequestedGrammar
from app.server.dialects.openai.content_parts import ContentPart, attachments_of, text_of
from app.server.dialects.openai.reports import ReportingRequest
from app.server.http.errors import InvalidRequest
from app.server.origin import Purpose
from app.server.request_fields import LogprobCount, PositiveCount
from app.server.structured_output import ResponseFormat, response_format_grammars

MAX_VARIABLES = 32
# Variables of the chat template that the server sets; clients may not.
OWN_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"))

VariableName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
TemplateVariables: TypeAlias = Annotated[dict[VariableName, Any], Meta(max_length=MAX_VARIABLES)]


class ReasoningOptions(Struct):
    """OpenRouter's field `reasoning`."""

    effort: ReasoningEffort | None = None
    max_tokens: ThinkingBudget | None = None
    enabled: bool | None = None
    exclude: bool | None = None  # true: the reply has no reasoning


class FunctionDefinition(Struct):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct):
    type: Literal["function"]
    function: FunctionDefinition

    def to_tool(self) -> Tool:
        function = self.function
        return function_tool(function.name, function.description, function.parameters, strict=function.strict)


class NamedFunction(Struct):
    name: ToolName


class NamedTool(Struct, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedFunction(Struct):
    type: Literal["function"]
    function: NamedFunction


class AllowedList(Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedList


ToolDefinitions: TypeAlias = Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)]
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | AllowedTools


def tool_options(definitions: Sequence[ToolDefinition], choice: ToolChoice | None) -> ToolOptions:
    tools = [definition.to_tool() for definition in definitions]
    match choice:
        case "none":
            return ToolOptions(tools, [])
        case "required":
            return ToolOptions(tools, use=ToolUse.FORCED)
        case NamedTool(function):
            return ToolOptions(tools, [function.name], ToolUse.FORCED)
        case AllowedTools(allowed):
            use = ToolUse.FORCED if allowed.mode == "required" else ToolUse.FREE
            return ToolOptions(tools, [tool.function.name for tool in allowed.tools], use)
    return ToolOptions(tools)


RoleName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]

# About half of all templates drop messages with the role "developer". Tools were once called functions.
_ROLES: Mapping[str, str] = {"developer": "system", "function": "tool"}


class FunctionCall(Struct):
    name: str
    arguments: str = ""


class MessageToolCall(Struct):
    function: FunctionCall
    id: str | None = None


class Prediction(Struct):
    """A text that the reply may repeat, such as a file that the user edits."""

    type: Literal["content"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content)


class ChatMessage(Struct):
    role: RoleName
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # a second name of `reasoning`
    tool_calls: list[MessageToolCall] | None = None
    function_call: FunctionCall | None = None  # sent by older clients, which allow one call
    tool_call_id: str | None = None

    def to_message(self) -> Message:
        """Convert the message. Raises InvalidMessage for audio, or arguments that are not a JSON object."""
        calls = [ToolCall.parse(c.function.name, c.function.arguments, c.id) for c in self.tool_calls or ()]
        if self.function_call is not None and not calls:
            calls = [ToolCall.parse(self.function_call.name, self.function_call.arguments)]
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        role = _ROLES.get(self.role, self.role)
        return Message(role, text_of(self.content), reasoning, tuple(calls), self.tool_call_id, self.name)


class ChatCompletionRequest(ReportingRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    response_format: ResponseFormat | None = None
    tools: ToolDefinitions | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: ThinkingBudget | None = None
    include_reasoning: bool | None = None  # false: the reply has no reasoning
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[str] | None = None
    prediction: Prediction | None = None

    def conversation(self) -> Conversation:
        """Convert the request to a conversation. Raises InvalidRequest naming the invalid message."""
        tools, thinking = self._tool_options(), self._thinking()
        messages = self._messages()
        reply_prefix = messages.pop().content if self.continue_final_message else ""
        return Conversation(
            messages,
            tools.tools,
            tools.allowed,
            tools.use,
            parallel_calls=self.parallel_tool_calls,
            thinking_budget=thinking.budget,
            variables=thinking.template_variables(self.chat_template_kwargs),
            reply_prefix=reply_prefix,
            add_generation_prompt=self.add_generation_prompt is not False,
            attachments=[*self._attachments()],
        )

    @property
    def reports_reasoning(self) -> bool:
        return self.include_reasoning is not False and not (self.reasoning and self.reasoning.exclude)

    def _tool_options(self) -> ToolOptions:
        return tool_options(self.tools or (), self.tool_choice)

    def _thinking(self) -> ThinkingOptions:
        reasoning_options = self.reasoning or ReasoningOptions()
        budgets = (self.thinking_token_budget, reasoning_options.max_tokens)
        return ThinkingOptions.of(self.reasoning_effort or reasoning_options.effort, budgets, reasoning_options.enabled)

    def _messages(self) -> list[Message]:
        messages = []
        for index, message in enumerate(self.messages):
            try:
                messages.append(message.to_message())
            except InvalidMessage as error:
                path = f"messages[{index}]"
                raise InvalidRequest(f"{path}: {error.message}", error.remedy, parameter=path) from error
        return messages

    def _attachments(self) -> Iterator[Attachment]:
        for index, message in enumerate(self.messages):
            yield from attachments_of(message.content, f"messages[{index}].content")

    def _purpose(self) -> Purpose:
        return Purpose.CHAT

    def _grammars(self) -> Iterator[RequestedGrammar]:
        yield from response_format_grammars(self.response_format)
        yield from super()._grammars()

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from super()._problems()
        yield from self._tool_options().problems()
        if self.use_beam_search and self._thinking().budget is not None:
            yield "thinking_token_budget", "a beam search has no thinking budget; leave one of them out."
        if taken := OWN_VARIABLES.intersection(self.chat_template_kwargs or ()):
            yield f"chat_template_kwargs.{min(taken)}", "the server sets it from the conversation; leave it out."
        last = self.messages[-1]
        if self.continue_final_message and self.add_generation_prompt:
            yield "add_generation_prompt", "it cannot be true with continue_final_message; leave it out."
        if self.continue_final_message and (last.role != "assistant" or last.tool_calls or not last.content):
            yield "continue_final_message", "the last message must be an assistant message with text; leave it out."
        if any(modality != "text" for modality in self.modalities or ()):
            yield "modalities", "this version writes text only; leave it out."
        if self.top_logprobs is not None and not self.logprobs:
            yield "top_logprobs", "it needs logprobs to be true."

    def _max_tokens(self) -> int | None:
        return super()._max_tokens() if self.max_completion_tokens is None else self.max_completion_tokens

    def _prediction(self) -> str:
        return "" if self.prediction is None else self.prediction.text

    def _logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None
