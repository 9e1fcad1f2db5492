"""Requests of LM Studio's own API: every field that is read, with its type and its bounds.

A chat becomes a request of the Responses API, which stores and continues responses in the same way.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from app.generation.conversation import ReasoningEffort
from app.server.dialects.openai.content_parts import ContentPart
from app.server.dialects.responses.input_items import InputItem
from app.server.dialects.responses.requests import ReasoningOptions, ResponseId, ResponseRequest
from app.server.http.errors import InvalidRequest
from app.server.request_fields import Fraction, KeepAlive, ModelName, PositiveCount, Temperature

MAX_PARTS = 1 << 12

Reasoning: TypeAlias = Literal["off", "low", "medium", "high", "on"]

_EFFORTS: Mapping[Reasoning, ReasoningEffort | None] = {
    "off": "none",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "on": None,  # no effort is set: a model reasons by default
}


class InputPart(Struct):
    """A text, or an image by its URL."""

    type: Literal["message", "text", "image"]
    content: str | None = None
    data_url: str | None = None

    def to_content(self, path: str) -> ContentPart:
        """Convert the part, which is at `path` in the request. Raises InvalidRequest for a text without content."""
        if self.type == "image":
            return ContentPart("input_image", image_url=self.data_url)
        if self.content is None:
            raise InvalidRequest(f"{path}.content: it is required", parameter=f"{path}.content")
        return ContentPart("input_text", self.content)


class ChatRequest(Struct, kw_only=True):
    """POST /api/v1/chat."""

    model: ModelName | None = None
    input: str | Annotated[list[InputPart], Meta(min_length=1, max_length=MAX_PARTS)]
    system_prompt: str | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Fraction | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    max_output_tokens: PositiveCount | None = None
    reasoning: Reasoning | None = None
    context_length: PositiveCount | None = None  # limit of prompt and reply together, in tokens
    store: bool | None = None  # default: true
    previous_response_id: ResponseId | None = None
    ttl: KeepAlive | None = None

    def response_request(self, earlier_prompt: str | None) -> ResponseRequest:
        """Return the same request for the Responses API.

        `earlier_prompt` is the system prompt of the chat that it continues. Raises InvalidRequest for a text without
        content.
        """
        effort = None if self.reasoning is None else _EFFORTS[self.reasoning]
        request = ResponseRequest(
            model=self.model,
            input=self._input(),
            instructions=self.system_prompt or earlier_prompt,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repeat_penalty,
            max_output_tokens=self.max_output_tokens,
            reasoning=ReasoningOptions(effort),
            num_ctx=self.context_length,
            store=self.store,
            previous_response_id=self.previous_response_id,
            ttl=self.ttl,
        )
        request.check()
        return request

    def _input(self) -> str | list[InputItem]:
        if isinstance(self.input, str):
            return self.input
        parts = [part.to_content(f"input[{index}]") for index, part in enumerate(self.input)]
        return [InputItem("message", role="user", content=parts)]


Name = Annotated[ModelName, Meta(min_length=1)]


class LoadRequest(Struct, kw_only=True):
    """POST /api/v1/models/load."""

    model: Name
    context_length: PositiveCount | None = None
    echo_load_config: bool | None = None
    ttl: KeepAlive | None = None


class UnloadRequest(Struct):
    """POST /api/v1/models/unload."""

    instance_id: Name


class DownloadRequest(Struct):
    """POST /api/v1/models/download."""

    model: Name
