"""Requests for reranking, and their documented fields.

`documents` are of Jina's API, vLLM and llama.cpp's server; `texts` of Hugging Face's text-embeddings-inference (TEI),
whose replies are bare lists.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from app.server.common_fields import ModelName, PositiveCount
from app.server.embedding_inputs import MAX_INPUTS, Truncation
from app.server.errors import refuse_first
from app.server.field_table import FieldTable, ignored, refused, supported

Text: TypeAlias = Annotated[str, Meta(min_length=1)]


class TextDocument(Struct):
    text: Text


Documents: TypeAlias = Annotated[list[Text | TextDocument], Meta(min_length=1, max_length=MAX_INPUTS - 1)]


class RerankRequest(Struct, kw_only=True):
    """POST /v1/rerank."""

    model: ModelName | None = None
    query: Text
    documents: Documents | None = None
    texts: Documents | None = None  # TEI's documents
    top_n: PositiveCount | None = None  # so many results, the best; all, if not given
    return_documents: bool | None = None
    return_text: bool | None = None  # the same in TEI's words
    raw_scores: bool | None = None  # a cross-encoder's logits
    truncate: bool | None = None  # TEI's: texts are cut to what the model reads
    truncate_prompt_tokens: Truncation | None = None
    user: str | None = None

    @property
    def is_bare(self) -> bool:
        """The reply is a bare list, as TEI's are."""
        return self.texts is not None

    @property
    def named(self) -> Mapping[str, str]:
        """The text of each document, by its place in the request."""
        field = "texts" if self.is_bare else "documents"
        given: Sequence[str | TextDocument] = self.texts or self.documents or ()
        return {f"{field}[{place}]": one if isinstance(one, str) else one.text for place, one in enumerate(given)}

    @property
    def truncation(self) -> int | None:
        return -1 if self.truncate and self.truncate_prompt_tokens is None else self.truncate_prompt_tokens

    def check(self) -> None:
        """Raise InvalidRequest for what no single field's bounds can say."""
        refuse_first(self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        if self.documents is None and self.texts is None:
            yield "documents", "it is required."
        if self.documents is not None and self.texts is not None:
            yield "texts", "documents are another name of them; leave one of them out."


RERANK = FieldTable(
    RerankRequest,
    {"query": "a", "documents": ["b"]},
    [
        supported("model", "vLLM, llama.cpp", "a-model", "Without it, the served model answers."),
        supported("query", "vLLM, llama.cpp, TEI", "a text"),
        supported("documents", "vLLM, llama.cpp", ["a", {"text": "b"}]),
        supported("texts", "TEI, llama.cpp", ["a"], "The reply is a list of objects with index and score."),
        supported("top_n", "vLLM, llama.cpp", 1),
        supported("return_documents", "Jina", True),
        supported("return_text", "TEI", True),
        supported("raw_scores", "TEI", True, "Logits of a cross-encoder; a cosine is as it is."),
        supported("truncate", "TEI", True),
        supported("truncate_prompt_tokens", "vLLM", -1),
        supported("user", "vLLM", "me", "It is checked and not used."),
        refused("truncation_direction", "TEI", "Left", "The end of a text is cut.", neutral=["Right"]),
        refused("truncation_side", "vLLM", "left", "The end of a text is cut.", neutral=["right"]),
        refused("max_tokens_per_doc", "vLLM", 10, "Send truncate_prompt_tokens.", neutral=[0]),
        refused("max_tokens_per_query", "vLLM", 10, "Send a shorter query.", neutral=[0]),
        refused("use_activation", "vLLM", False, "Send raw_scores.", neutral=[True]),
        refused("activation", "vLLM", False, "Send raw_scores.", neutral=[True]),
        refused("prompt_name", "TEI", "query", "Send the prompt as a part of the texts."),
        ignored("priority", "vLLM", 1, "Requests take turns."),
        ignored("request_id", "vLLM", "r-1", "A reply has no id."),
        ignored("cache_salt", "vLLM", "mine", "Nothing is cached."),
        ignored("mm_processor_kwargs", "vLLM", {"a": 1}, "It is about images, which are refused."),
    ],
)

TABLES: Mapping[str, FieldTable[Any]] = {"POST /v1/rerank": RERANK}
