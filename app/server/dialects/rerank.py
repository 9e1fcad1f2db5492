"""Reranking: which of several documents answers a query best.

A cross-encoder reads each document together with the query, and says so itself; with other models that give vectors,
the relevance of a document is the cosine of its vector and the query's. Fields are those that Jina's API, vLLM and
llama.cpp's server have in common; the path is theirs, too.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app.embedding_service import EmbeddingService
from app.server.embedding_inputs import MAX_INPUTS, Truncation, check_sequence, most_tokens, read_inputs
from app.server.endpoint import Endpoint
from app.server.field_types import ModelName, PositiveCount
from app.server.reply import while_connected
from app.server.request_body import read_body
from app.server.served_model import ServedModel

PATHS = ("/v1/rerank", "/rerank")

Text: TypeAlias = Annotated[str, Meta(min_length=1)]


class TextDocument(Struct):
    text: Text


class RerankRequest(Struct, kw_only=True):
    """POST /v1/rerank."""

    model: ModelName | None = None
    query: Text
    documents: Annotated[list[Text | TextDocument], Meta(min_length=1, max_length=MAX_INPUTS - 1)]
    top_n: PositiveCount | None = None  # so many results, the best; all, if not given
    return_documents: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


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


class RerankEndpoints:
    """Serves one model that gives vectors, or one that ranks."""

    def __init__(self, service: EmbeddingService, model: ServedModel) -> None:
        self._service = service
        self._model = model
        self._decoder = msgspec.json.Decoder(RerankRequest)

    def endpoints(self) -> list[Endpoint]:
        summary = "Which documents answer a query best"
        return [Endpoint("POST", path, self.rerank, summary, takes=RerankRequest, gives=Ranking) for path in PATHS]

    async def rerank(self, request: Request) -> Response:
        wanted = await read_body(request, self._decoder)
        model = self._model.named(wanted.model)
        body: list[bytes] = []

        async def answer() -> None:
            scores, tokens = await (self._by_pairs(wanted) if self._service.ranks else self._by_vectors(wanted))
            body.append(await asyncio.to_thread(_body, scores, wanted, model, tokens))

        await while_connected(request.receive, answer())
        return Response(b"".join(body), media_type="application/json")

    async def _by_pairs(self, wanted: RerankRequest) -> tuple[list[float], int]:
        """The score of each document, and the tokens that were read for all."""
        most = most_tokens(self._service, wanted.truncate_prompt_tokens)
        pairs = await self._service.encode_pairs(wanted.query, wanted.texts, most)
        for name, pair in zip(_names(wanted), pairs, strict=True):
            check_sequence(self._service, name, pair.ids, most)
        return await self._service.scores(pairs), sum(len(pair.ids) for pair in pairs)

    async def _by_vectors(self, wanted: RerankRequest) -> tuple[list[float], int]:
        inputs = {"query": wanted.query, **dict(zip(_names(wanted), wanted.texts, strict=True))}
        sequences = await read_inputs(self._service, inputs, wanted.truncate_prompt_tokens)
        query, *documents = await self._service.embed(sequences)
        return [float(query @ document) for document in documents], sum(map(len, sequences))


def _names(wanted: RerankRequest) -> list[str]:
    return [f"documents[{place}]" for place in range(len(wanted.documents))]


def _body(scores: Sequence[float], wanted: RerankRequest, model: str, tokens: int) -> bytes:
    best = sorted(range(len(scores)), key=lambda place: (-scores[place], place))[: wanted.top_n]
    results = [RankedDocument(place, scores[place], _told(wanted, place)) for place in best]
    return msgspec.json.encode(Ranking(model, results, RerankUsage(tokens, tokens)))


def _told(wanted: RerankRequest, place: int) -> TextDocument | UnsetType:
    return TextDocument(wanted.texts[place]) if wanted.return_documents else UNSET
