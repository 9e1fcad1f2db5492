"""Reranking: sorts documents by how well they answer a query.

A cross-encoder reads each document together with the query and scores the pair. With other models that return vectors,
the relevance of a document is the cosine of its vector and the query's. Fields and paths are those of Jina's API, vLLM,
llama.cpp's server, and Hugging Face's text-embeddings-inference (TEI), whose replies are bare lists.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app.generation.embedding_service import EmbeddingService
from app.server.embedding_inputs import (
    MAX_INPUTS,
    Truncation,
    check_sequence,
    convert_input_errors,
    read_inputs,
    truncation_limit,
)
from app.server.http.endpoint import Endpoint
from app.server.http.errors import raise_first
from app.server.http.reply import json_reply_on_thread
from app.server.http.request_body import read_body
from app.server.request_fields import FieldTable, ModelName, PositiveCount, ignored, refused, supported
from app.server.served_models import ServedModels

Text: TypeAlias = Annotated[str, Meta(min_length=1)]


class TextDocument(Struct):
    text: Text


Documents: TypeAlias = Annotated[list[Text | TextDocument], Meta(min_length=1, max_length=MAX_INPUTS - 1)]


class RerankRequest(Struct, kw_only=True):
    """POST /v1/rerank."""

    model: ModelName | None = None
    query: Text
    documents: Documents | None = None
    texts: Documents | None = None  # TEI's name for documents
    top_n: PositiveCount | None = None  # number of results, the best first; default: all
    return_documents: bool | None = None
    return_text: bool | None = None  # TEI's name for return_documents
    raw_scores: bool | None = None  # return a cross-encoder's logits
    truncate: bool | None = None  # TEI's field: cut texts to the model's context length
    truncate_prompt_tokens: Truncation | None = None
    user: str | None = None

    @property
    def is_bare(self) -> bool:
        """Whether the reply is a bare list, as TEI's are."""
        return self.texts is not None

    @property
    def documents_by_path(self) -> Mapping[str, str]:
        """The text of each document, keyed by its path in the request."""
        field = "texts" if self.is_bare else "documents"
        given: Sequence[str | TextDocument] = self.texts or self.documents or ()
        return {f"{field}[{index}]": one if isinstance(one, str) else one.text for index, one in enumerate(given)}

    @property
    def truncation(self) -> int | None:
        return -1 if self.truncate and self.truncate_prompt_tokens is None else self.truncate_prompt_tokens

    def check(self) -> None:
        """Raise InvalidRequest for problems that the bounds of single fields cannot express."""
        raise_first(self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        if self.documents is None and self.texts is None:
            yield "documents", "it is required."
        if self.documents is not None and self.texts is not None:
            yield "texts", "it is another name of documents; leave one of them out."


RERANK = FieldTable(
    RerankRequest,
    {"query": "a", "documents": ["b"]},
    [
        supported("model", "vLLM, llama.cpp", "a-model", "Default: the served model."),
        supported("query", "vLLM, llama.cpp, TEI", "a text"),
        supported("documents", "vLLM, llama.cpp", ["a", {"text": "b"}]),
        supported("texts", "TEI, llama.cpp", ["a"], "The reply is a list of objects with index and score."),
        supported("top_n", "vLLM, llama.cpp", 1),
        supported("return_documents", "Jina", True),
        supported("return_text", "TEI", True),
        supported("raw_scores", "TEI", True, "Returns a cross-encoder's logits; it does not change a cosine."),
        supported("truncate", "TEI", True),
        supported("truncate_prompt_tokens", "vLLM", -1),
        supported("user", "vLLM", "me", "Validated, but not used."),
        refused("truncation_direction", "TEI", "Left", "Texts are always cut at the end.", neutral=["Right"]),
        refused("truncation_side", "vLLM", "left", "Texts are always cut at the end.", neutral=["right"]),
        refused("max_tokens_per_doc", "vLLM", 10, "Send truncate_prompt_tokens.", neutral=[0]),
        refused("max_tokens_per_query", "vLLM", 10, "Send a shorter query.", neutral=[0]),
        refused("use_activation", "vLLM", False, "Send raw_scores.", neutral=[True]),
        refused("activation", "vLLM", False, "Send raw_scores.", neutral=[True]),
        refused("prompt_name", "TEI", "query", "Include the prompt in the texts."),
        ignored("priority", "vLLM", 1, "Requests are served in order of arrival."),
        ignored("request_id", "vLLM", "r-1", "Replies have no id."),
        ignored("cache_salt", "vLLM", "mine", "Nothing is cached."),
        ignored("mm_processor_kwargs", "vLLM", {"a": 1}, "It applies to images, which no model here can see."),
    ],
)

TABLES: Mapping[str, FieldTable[Any]] = {"POST /v1/rerank": RERANK}


PATHS = ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")


class RankedDocument(Struct):
    index: int  # index of the document in the request
    relevance_score: float  # 0 to 1 from a cross-encoder, else -1 to 1
    document: TextDocument | UnsetType = UNSET


class RerankUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Ranking(Struct):
    """The documents, the most relevant first."""

    model: str
    results: list[RankedDocument]
    usage: RerankUsage
    object: str = "list"


class BareRank(Struct):
    """A document of TEI's reply."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class RerankEndpoints:
    """Endpoints that rank documents, with an embedding model or a cross-encoder."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def endpoints(self) -> list[Endpoint]:
        summary = "Rank documents by their relevance to a query"
        gives = Ranking | list[BareRank]
        return [Endpoint("POST", path, self.rerank, summary, takes=RerankRequest, gives=gives) for path in PATHS]

    async def rerank(self, request: Request) -> Response:
        body = await read_body(request, RERANK)
        body.check()
        served = await self._models.embedder(request, body.model)
        service, model = served.service, served.name
        scores, tokens = await (_by_pairs(service, body) if service.ranks else _by_vectors(service, body))
        return await json_reply_on_thread(service.texts, lambda _: _encode_ranking(scores, body, model, tokens))


async def _by_pairs(service: EmbeddingService, body: RerankRequest) -> tuple[list[float], int]:
    """Return the score of each document, and the total number of tokens that the model read."""
    limit, documents = truncation_limit(service, body.truncation), body.documents_by_path
    with convert_input_errors(service, ["query", *documents]):
        pairs = await service.encode_pairs(body.query, list(documents.values()), limit)
    for name, pair in zip(documents, pairs, strict=True):
        check_sequence(service, name, pair.ids, limit)
    scores = await service.scores(pairs, raw=bool(body.raw_scores))
    return scores, sum(len(pair.ids) for pair in pairs)


async def _by_vectors(service: EmbeddingService, body: RerankRequest) -> tuple[list[float], int]:
    inputs = {"query": body.query, **body.documents_by_path}
    sequences = await read_inputs(service, inputs, body.truncation)
    query, *documents = await service.embed(sequences)
    return [float(query @ document) for document in documents], sum(map(len, sequences))


def _encode_ranking(scores: Sequence[float], body: RerankRequest, model: str, tokens: int) -> bytes:
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n]
    texts: Sequence[str | UnsetType] = [UNSET] * len(scores)
    if body.return_documents or body.return_text:
        texts = list(body.documents_by_path.values())
    if body.is_bare:
        return msgspec.json.encode([BareRank(index, scores[index], texts[index]) for index in best])
    results = [RankedDocument(index, scores[index], _document(texts[index])) for index in best]
    return msgspec.json.encode(Ranking(model, results, RerankUsage(tokens, tokens)))


def _document(text: str | UnsetType) -> TextDocument | UnsetType:
    return text if isinstance(text, UnsetType) else TextDocument(text)
