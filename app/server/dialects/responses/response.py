"""A response as it is sent and stored: fields of the request, output items, and usage."""

import time
import uuid
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from app.generation.cache_report import PromptTokensDetails
from app.generation.events import TokenCounts
from app.generation.options import DefaultSampling
from app.server.dialects.openai.reports import CompletionTokensDetails
from app.server.dialects.responses.output_items import OutputItem
from app.server.dialects.responses.requests import ReasoningOptions, ResponseRequest, TextOptions

Status: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputTokensDetails(PromptTokensDetails):
    """Details about the prompt's tokens. `cache_write_tokens` is the number of computed tokens: all are written."""

    cache_write_tokens: int = 0


class Usage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, counts: TokenCounts) -> "Usage":
        details = InputTokensDetails.of(counts.cache)
        details.cache_write_tokens = details.computed_tokens
        output = CompletionTokensDetails.of(counts)
        return cls(counts.prompt, details, counts.completion, output, counts.prompt + counts.completion)


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    code: str
    message: str


class Response(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int  # Unix time in seconds, like the next field
    completed_at: int | None = None
    status: Status = "in_progress"
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: Any
    tools: list[dict[str, Any]]  # tools that the model can see
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: Usage | None = None
    user: str | None

    @classmethod
    def create(cls, body: ResponseRequest, model: str, defaults: DefaultSampling) -> "Response":
        """Create the response to a request. `defaults` are the sampling values that the request leaves open."""
        sampling = body.sampling_options(sampling=defaults).candidates[0]
        return cls(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            status="queued" if body.background else "in_progress",
            background=bool(body.background),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            model=model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=body.reasoning or ReasoningOptions(),
            safety_identifier=body.safety_identifier,
            store=body.store is not False,
            temperature=sampling.temperature,
            text=body.reported_text,
            tool_choice=body.reported_choice,
            tools=body.offered.reported,
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            user=body.user,
        )

    @property
    def has_ended(self) -> bool:
        return self.status not in ("queued", "in_progress")

    def started(self) -> "Response":
        return replace(self, status="in_progress")

    def ended(self, status: Status, output: list[OutputItem], counts: TokenCounts) -> "Response":
        """Return the response in its final state: complete, or cut off by its token limit."""
        completed_at = int(time.time()) if status == "completed" else None
        details = IncompleteDetails("max_output_tokens") if status == "incomplete" else None
        return replace(
            self,
            status=status,
            completed_at=completed_at,
            incomplete_details=details,
            output=output,
            usage=Usage.of(counts),
        )

    def failed(self, output: list[OutputItem], error: ResponseError) -> "Response":
        return replace(self, status="failed", output=output, error=error)

    def cancelled(self, output: list[OutputItem]) -> "Response":
        return replace(self, status="cancelled", output=output)
