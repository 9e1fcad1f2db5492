"""Requests for embeddings through OpenAI's API, whose inputs are strings or token ids."""

from typing import Literal, TypeAlias

from msgspec import Struct

from app.server.dialects.openai.completion_requests import Prompts, split_prompts
from app.server.embedding_inputs import MAX_INPUTS, Truncation, invalid_input
from app.server.http.errors import InvalidRequest
from app.server.request_fields import KeepAlive, ModelName, PositiveCount

Encoding: TypeAlias = Literal["float", "base64"]


class EmbeddingRequest(Struct, kw_only=True):
    """POST /v1/embeddings."""

    model: ModelName | None = None
    input: Prompts
    encoding_format: Encoding | None = None
    dimensions: PositiveCount | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncation | None = None  # vLLM's field
    ttl: KeepAlive | None = None  # LM Studio's field

    def inputs(self) -> list[str | tuple[int, ...]]:
        """Return the inputs, each a string or token ids. Raises InvalidRequest."""
        inputs = split_prompts(self.input, "input")
        if len(inputs) > MAX_INPUTS:
            problem = f"{len(inputs)} inputs exceed the limit of {MAX_INPUTS}."
            raise InvalidRequest(f"input: {problem}", "Send several requests.", parameter="input")
        for index, one in enumerate(inputs):
            if not one:
                raise invalid_input(f"input[{index}]", "it is empty")
        return inputs
