"""Requests for token ids, texts, prompts, and vectors: every field that is read, with its type and its bounds."""

from dataclasses import replace
from typing import Annotated

from msgspec import Meta, Struct

from app.generation.conversation import Conversation, ReasoningEffort
from app.generation.template import MAX_TEXT_CHARS
from app.server.dialects.llama_cpp.prompts import Prompts, split_prompts
from app.server.dialects.openai.chat_requests import (
    ChatCompletionRequest,
    ChatMessage,
    TemplateVariables,
    ToolChoice,
    ToolDefinitions,
)
from app.server.http.errors import InvalidRequest
from app.server.request_fields import ModelName, TokenId

Messages = Annotated[list[ChatMessage], Meta(min_length=1)]


class PromptOptions(Struct, kw_only=True):
    """Fields that determine the prompt of a conversation."""

    model: ModelName | None = None
    tools: ToolDefinitions | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None  # default: true
    continue_final_message: bool | None = None  # the prompt ends with the last message, without an end token

    def conversation_of(self, messages: list[ChatMessage]) -> Conversation:
        """Convert the messages to a conversation. Raises InvalidRequest naming the invalid field."""
        if self.continue_final_message and self.add_generation_prompt:
            problem = "add_generation_prompt: it cannot be true together with continue_final_message"
            raise InvalidRequest(problem, "Leave one of them out.", parameter="add_generation_prompt")
        chat = ChatCompletionRequest(
            messages=messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            reasoning_effort=self.reasoning_effort,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        chat.check()
        conversation = chat.conversation()
        if not self.continue_final_message:
            return replace(conversation, add_generation_prompt=self.add_generation_prompt is not False)
        *before, last = conversation.messages
        if last.role != "assistant":
            problem = "continue_final_message: the last message is not from the assistant"
            raise InvalidRequest(problem, parameter="continue_final_message")
        return replace(conversation, messages=before, reply_prefix=last.content)


class TokenizeRequest(PromptOptions, kw_only=True):
    """POST /tokenize. Exactly one of `content` (llama.cpp), `prompt`, and `messages` (vLLM) must be set."""

    content: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)] | None = None
    add_special: bool = False  # add a BOS token if the model uses one
    parse_special: bool = True
    with_pieces: bool = False
    prompt: str | None = None
    messages: Messages | None = None
    # default: true for a prompt, false for messages, because their template writes these tokens
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequest unless the request has exactly one text or conversation."""
        if sum(one is not None for one in (self.content, self.prompt, self.messages)) != 1:
            problem = "content: send one of content, prompt, and messages"
            raise InvalidRequest(problem, parameter="content")


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize. Clients of vLLM send a model; clients of llama.cpp do not."""

    tokens: Annotated[list[TokenId], Meta(max_length=1 << 20)]
    model: ModelName | None = None


class TemplateRequest(PromptOptions, kw_only=True):
    """POST /apply-template."""

    messages: Messages

    def conversation(self) -> Conversation:
        return self.conversation_of(self.messages)


class EmbeddingRequest(Struct, kw_only=True):
    """POST /embedding."""

    content: Prompts
    model: ModelName | None = None
    # order of the norm that vectors are scaled by; default: 2
    embd_normalize: Annotated[int, Meta(ge=-1, le=64)] | None = None

    def inputs(self) -> dict[str, str | tuple[int, ...]]:
        """Return texts and token ids, keyed by their paths. Raises InvalidRequest for a list that mixes both."""
        inputs: dict[str, str | tuple[int, ...]] = {}
        for path, given in split_prompts(self.content, "content").items():
            ids = [item for item in given if isinstance(item, int)] if not isinstance(given, str) else []
            if not isinstance(given, str) and len(ids) < len(given):
                raise InvalidRequest(f"{path}: an input must be a string or token ids, not both", parameter=path)
            inputs[path] = given if isinstance(given, str) else tuple(ids)
        return inputs
