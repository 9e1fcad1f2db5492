"""Requests of Ollama's API about a model, and for vectors: every field that is read, with its type and its bounds."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from app.server.common_fields import ModelName, PositiveCount
from app.server.embedding_inputs import MAX_INPUTS


class Named(Struct, kw_only=True):
    """A request about a model."""

    model: ModelName = ""
    name: ModelName = ""  # the same by its older name

    @property
    def asked_for(self) -> str:
        return self.model or self.name


class ShowRequest(Named, kw_only=True):
    """POST /api/show."""


class PullRequest(Named, kw_only=True):
    """POST /api/pull."""

    stream: bool | None = None  # true, if not given


class DeleteRequest(Named, kw_only=True):
    """DELETE /api/delete."""


class EmbedRequest(Named, kw_only=True):
    """POST /api/embed."""

    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    truncate: bool | None = None  # true, if not given: longer texts are cut
    dimensions: PositiveCount | None = None

    def inputs(self) -> Mapping[str, str]:
        """The texts by their places. An empty text alone is none."""
        if isinstance(self.input, list):
            return {f"input[{place}]": text for place, text in enumerate(self.input)}
        return {"input": self.input} if self.input else {}


class EmbeddingsRequest(Named, kw_only=True):
    """POST /api/embeddings, the older one."""

    prompt: str = ""
