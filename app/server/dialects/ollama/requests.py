"""Requests of Ollama's API: every field that is read, with its type and its bounds.

`fields` lists all documented fields. `num_ctx` only limits a prompt and its reply: no request reloads a loaded model.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Raw, Struct

from app.generation.attachments import Attachment
from app.generation.conversation import Conversation, Message, ReasoningEffort, ThinkingOptions, ToolCall, ToolOptions
from app.generation.options import API_DEFAULTS, PLAIN_REPLY, DefaultSampling, GenerationOptions, ReplyOptions
from app.server.dialects.llama_cpp.sampling import LlamaSampling, reply_limit
from app.server.dialects.openai.chat_requests import ToolChoice, ToolDefinitions, tool_options
from app.server.embedding_inputs import MAX_INPUTS
from app.server.http.errors import InvalidRequest, bounded, raise_first
from app.server.origin import OriginFields, Purpose
from app.server.request_fields import MAX_SECONDS, LogprobCount, ModelName, PositiveCount, TokenId
from app.server.structured_output import Schema, format_grammar
from engine.sampling_params import SamplingParams


class ModelRequest(Struct, kw_only=True):
    """A request about a model."""

    model: ModelName = ""
    name: ModelName = ""  # the older name of `model`

    @property
    def model_name(self) -> str:
        return self.model or self.name

    def required_name(self) -> str:
        """Return the name of the model. Raises InvalidRequest if there is none."""
        if not self.model_name:
            raise InvalidRequest("model: it is required", parameter="model")
        return self.model_name


class ShowRequest(ModelRequest, kw_only=True):
    """POST /api/show."""


class PullRequest(ModelRequest, kw_only=True):
    """POST /api/pull."""

    stream: bool | None = None  # default: true


class DeleteRequest(ModelRequest, kw_only=True):
    """DELETE /api/delete."""


_NUMBER = re.compile(r"-?\d{1,15}")
# Go's notation of a duration: numbers with units, such as 1h30m
_PARTS = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|\u00b5s|\u03bcs|ms|s|m|h)")
_SECONDS: Mapping[str, float] = {
    "ns": 1e-9,
    "us": 1e-6,
    "\u00b5s": 1e-6,
    "\u03bcs": 1e-6,
    "ms": 1e-3,
    "s": 1,
    "m": 60,
    "h": 3600,
}


class KeepingRequest(ModelRequest, kw_only=True):
    """A request that loads a model."""

    keep_alive: float | Annotated[str, Meta(max_length=64)] | None = (
        None  # seconds or a duration; see `keep_alive_seconds`
    )

    def keep_alive_seconds(self) -> float | None:
        """Return the seconds after its last use until the model is unloaded; below 0: no limit; None: unchanged.

        Raises InvalidRequest for an invalid duration.
        """
        kept = self.keep_alive
        seconds = _seconds(kept) if isinstance(kept, str) else kept
        return None if seconds is None else max(-1.0, min(seconds, MAX_SECONDS))


def _seconds(text: str) -> float:
    """Parse a number of seconds, or a duration in Go's notation."""
    if _NUMBER.fullmatch(text):
        return float(text)
    unsigned = text.removeprefix("-")
    if not unsigned or _PARTS.sub("", unsigned):
        problem = f"keep_alive: {bounded(repr(text))} is not a duration"
        raise InvalidRequest(problem, 'Send seconds, or a duration such as "5m".', parameter="keep_alive")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PARTS.findall(unsigned))
    return -seconds if text.startswith("-") else seconds


class EmbedRequest(KeepingRequest, kw_only=True):
    """POST /api/embed."""

    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    truncate: bool | None = None  # default: true; longer texts are cut
    dimensions: PositiveCount | None = None

    def inputs(self) -> Mapping[str, str]:
        """Return the texts, keyed by their paths. A single empty string counts as no text."""
        if isinstance(self.input, list):
            return {f"input[{index}]": text for index, text in enumerate(self.input)}
        return {"input": self.input} if self.input else {}


class EmbeddingsRequest(KeepingRequest, kw_only=True):
    """POST /api/embeddings, the older path."""

    prompt: str = ""


MAX_CONTEXT = 1 << 20  # limit of the token ids in `context`

Thinking: TypeAlias = bool | ReasoningEffort
Format: TypeAlias = Literal["", "json"] | Schema


# Ollama's defaults except its repetition penalty, which covers only the last tokens. The engine's penalty would cover
# all tokens.
_DEFAULTS: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}


class Options(LlamaSampling, kw_only=True):
    """Options for sampling and length."""

    num_ctx: PositiveCount | None = None  # limit of prompt and reply together, in tokens
    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None  # below 0: the rest of the context


class GeneratingRequest(KeepingRequest, kw_only=True):
    """Fields of chat and generate requests."""

    stream: bool | None = None  # default: true
    format: Format | None = None
    options: Options | None = None
    think: Thinking | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def generation_options(self, sampling: DefaultSampling = API_DEFAULTS) -> GenerationOptions:
        """Return the options of the reply. `sampling` sets values that the request leaves open.

        Raises InvalidSampling, and InvalidRequest for an invalid grammar.
        """
        options = self.options or Options()
        length, reported = options.num_predict, self.top_logprobs or 0 if self.logprobs else None
        given = sampling.fill(options.sampling(), _DEFAULTS, inserts=self._purpose() is Purpose.INSERTION)
        given |= {"dry": options.dry()}
        params = SamplingParams(**given, max_tokens=reply_limit(length), logprobs=reported)
        return GenerationOptions(
            [params],
            reports_logprobs=reported is not None,
            grammar=format_grammar(self.format),
            breakers=options.breakers(),
            context=options.num_ctx,
            reply=self._reply_options(),
            returns_text=length != 0,
        )

    def thinking(self) -> ThinkingOptions:
        if isinstance(self.think, str):
            return ThinkingOptions.of(self.think)
        return ThinkingOptions.of(None, enabled=self.think)

    def origin_fields(self) -> OriginFields:
        return OriginFields(self._purpose())

    def check(self) -> None:
        """Raise InvalidRequest for problems that the bounds of single fields cannot express."""
        raise_first(self._problems())

    # Subclasses override the following methods.

    def _purpose(self) -> Purpose:
        return Purpose.CHAT

    def _reply_options(self) -> ReplyOptions:
        return PLAIN_REPLY

    def _problems(self) -> Iterator[tuple[str, str]]:
        return iter(())


class CalledFunction(Struct):
    name: str
    arguments: dict[str, Any] = {}


class MessageToolCall(Struct):
    function: CalledFunction
    id: str | None = None


Images: TypeAlias = list[Raw]  # each in base64, without its name or type


def _attachments(images: Images | None, path: str) -> list[Attachment]:
    return [Attachment("image", f"{path}[{index}]") for index in range(len(images or ()))]


def _with_images(text: str, images: Images | None) -> str:
    """Return the words for the images, and the text."""
    return "\n".join(filter(None, (*(image.words for image in _attachments(images, "")), text)))


class ChatMessage(Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def to_message(self) -> Message:
        calls = tuple(ToolCall(call.function.name, call.function.arguments, call.id) for call in self.tool_calls or ())
        content = _with_images(self.content or "", self.images)
        return Message(self.role, content, self.thinking, calls, self.tool_call_id, self.tool_name)


class ChatRequest(GeneratingRequest, kw_only=True):
    """POST /api/chat."""

    messages: list[ChatMessage] | None = None
    tools: ToolDefinitions | None = None
    tool_choice: ToolChoice | None = None  # OpenAI's field; Ollama has none

    @property
    def only_loads(self) -> bool:
        """Whether the request asks only for the model to be loaded."""
        return not self.messages

    def conversation(self) -> Conversation:
        tools, thinking = self._tool_options(), self.thinking()
        return Conversation(
            [message.to_message() for message in self.messages or ()],
            tools.tools,
            tools.allowed,
            tools.use,
            thinking_budget=thinking.budget,
            variables=thinking.template_variables(),
            attachments=[
                image
                for index, message in enumerate(self.messages or ())
                for image in _attachments(message.images, f"messages[{index}].images")
            ],
        )

    def _tool_options(self) -> ToolOptions:
        return tool_options(self.tools or (), self.tool_choice)

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from super()._problems()
        yield from self._tool_options().problems()


class GenerateRequest(GeneratingRequest, kw_only=True):
    """POST /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    context: Annotated[list[TokenId], Meta(max_length=MAX_CONTEXT)] | None = None  # field `context` of an earlier reply
    raw: bool | None = None
    images: Images | None = None

    @property
    def only_loads(self) -> bool:
        """Whether the request asks only for the model to be loaded."""
        return not self.prompt and not self.suffix and not self.images

    @property
    def continues_text(self) -> bool:
        """Whether to continue the prompt itself instead of answering it in a chat."""
        return bool(self.raw or self.suffix)

    def conversation(self) -> Conversation:
        thinking, system_messages = self.thinking(), [Message("system", self.system)] if self.system else []
        messages = [*system_messages, Message("user", _with_images(self.prompt, self.images))]
        return Conversation(
            messages,
            thinking_budget=thinking.budget,
            variables=thinking.template_variables(),
            context=tuple(self.context or ()),
            attachments=_attachments(self.images, "images"),
        )

    def _purpose(self) -> Purpose:
        if self.suffix:
            return Purpose.INSERTION
        return Purpose.COMPLETION if self.raw else Purpose.CHAT

    def _reply_options(self) -> ReplyOptions:
        """Report token ids in chats, because the reply's field `context` contains them."""
        return ReplyOptions(reports_tokens=not self.continues_text)

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from super()._problems()
        if self.raw and self.system:
            yield "system", "a raw prompt has no system message; leave one of them out."
        if self.continues_text and self.images:
            yield "images", "this version reads text only; leave them out, or leave out raw and suffix."
        if self.continues_text and self.context:
            yield "context", "it continues a chat; leave it out, or leave out raw and suffix."
