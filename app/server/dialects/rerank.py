"""Reranking: which of several documents answers a query best.

A cross-encoder reads each document together with the query, and says so itself; with other models that give vectors,
the relevance of a document is the cosine of its vector and the query's. Fields and paths are those of Jina's API, vLLM,
llama.cpp's server and TEI.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app.generation.embedding_service import EmbeddingService
from app.server.dialects.rerank_requests import RERANK, RerankRequest, TextDocument
from app.server.embedding_inputs import check_sequence, most_tokens, naming_inputs, read_inputs
from app.server.endpoint import Endpoint
from app.server.http.reply import written_reply
from app.server.http.request_body import read_body
from app.server.served_model import ServedModel

PATHS = ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")


class RankedDocument(Struct):
    index: int  # of the document in the request
    relevance_score: float  # by a cross-encoder 0 to 1, else -1 to 1
    document: TextDocument | UnsetType = UNSET


class RerankUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Ranking(Struct):
    """Most relevant first."""

    model: str
    results: list[RankedDocument]
    usage: RerankUsage
    object: str = "list"


class BareRank(Struct):
    """A document of a reply that is a list, as TEI has it."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class RerankEndpoints:
    """Serves one model that gives vectors, or one that ranks."""

    def __init__(self, service: EmbeddingService, model: ServedModel) -> None:
        self._service = service
        self._model = model

    def endpoints(self) -> list[Endpoint]:
        summary = "Which documents answer a query best"
        gives = Ranking | list[BareRank]
        return [Endpoint("POST", path, self.rerank, summary, takes=RerankRequest, gives=gives) for path in PATHS]

    async def rerank(self, request: Request) -> Response:
        wanted = await read_body(request, RERANK)
        model = self._model.named(wanted.model)
        wanted.check()
        scores, tokens = await (self._by_pairs(wanted) if self._service.ranks else self._by_vectors(wanted))
        return await written_reply(self._service.texts, lambda _: _body(scores, wanted, model, tokens))

    async def _by_pairs(self, wanted: RerankRequest) -> tuple[list[float], int]:
        """The score of each document, and the tokens that were read for all."""
        most, documents = most_tokens(self._service, wanted.truncation), wanted.named
        with naming_inputs(self._service, ["query", *documents]):
            pairs = await self._service.encode_pairs(wanted.query, list(documents.values()), most)
        for name, pair in zip(documents, pairs, strict=True):
            check_sequence(self._service, name, pair.ids, most)
        scores = await self._service.scores(pairs, raw=bool(wanted.raw_scores))
        return scores, sum(len(pair.ids) for pair in pairs)

    async def _by_vectors(self, wanted: RerankRequest) -> tuple[list[float], int]:
        inputs = {"query": wanted.query, **wanted.named}
        sequences = await read_inputs(self._service, inputs, wanted.truncation)
        query, *documents = await self._service.embed(sequences)
        return [float(query @ document) for document in documents], sum(map(len, sequences))


def _body(scores: Sequence[float], wanted: RerankRequest, model: str, tokens: int) -> bytes:
    best = sorted(range(len(scores)), key=lambda place: (-scores[place], place))[: wanted.top_n]
    texts: Sequence[str | UnsetType] = [UNSET] * len(scores)
    if wanted.return_documents or wanted.return_text:
        texts = list(wanted.named.values())
    if wanted.is_bare:
        return msgspec.json.encode([BareRank(place, scores[place], texts[place]) for place in best])
    results = [RankedDocument(place, scores[place], _document(texts[place])) for place in best]
    return msgspec.json.encode(Ranking(model, results, RerankUsage(tokens, tokens)))


def _document(text: str | UnsetType) -> TextDocument | UnsetType:
    return text if isinstance(text, UnsetType) else TextDocument(text)
