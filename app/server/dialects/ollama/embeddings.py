"""Ollama's embeddings, and its other endpoints for an embedding model."""

import time
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from app.generation.embedding_service import EmbeddingService, truncate
from app.server.dialects.ollama.errors import ERRORS
from app.server.dialects.ollama.fields import EMBED, EMBEDDINGS
from app.server.dialects.ollama.requests import (
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    KeepingRequest,
)
from app.server.embedding_inputs import check_dimensions, read_inputs
from app.server.http.endpoint import Endpoint
from app.server.http.reply import json_reply, json_reply_on_thread
from app.server.http.request_body import read_body
from app.server.served_models import ServedModels

WHOLE_TEXT = -1  # limit that cuts each text to the context length

GENERATING: Mapping[str, type[Struct]] = {"/api/chat": ChatRequest, "/api/generate": GenerateRequest}


class Embedded(Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int  # nanoseconds
    load_duration: int = 0
    prompt_eval_count: int


class Embedding(Struct):
    embedding: list[float]


# Path -> type of the request body, for paths that a model without vectors refuses.
VECTORS: Mapping[str, type[Struct]] = {"/api/embed": EmbedRequest, "/api/embeddings": EmbeddingsRequest}


class OllamaEmbeddingEndpoints:
    """Endpoints that compute vectors."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def endpoints(self) -> list[Endpoint]:
        endpoint = partial(Endpoint, errors=ERRORS)
        several, one, path = "Compute the vectors of texts", "Compute the vector of a text", "/api/embeddings"
        return [
            endpoint("POST", "/api/embed", self.embed, several, takes=EmbedRequest, gives=Embedded),
            endpoint("POST", path, self.embed_one, one, takes=EmbeddingsRequest, gives=Embedding),
        ]

    async def embed(self, request: Request) -> Response:
        body = await read_body(request, EMBED)
        service = await self._service(request, body)
        check_dimensions(service, body.dimensions)
        started_at = time.monotonic()
        vectors, tokens = await _vectors(service, body.inputs(), None if body.truncate is False else WHOLE_TEXT)
        seconds = time.monotonic() - started_at
        return await json_reply_on_thread(service.texts, lambda _: _encode_embeddings(body, vectors, tokens, seconds))

    async def embed_one(self, request: Request) -> Response:
        body = await read_body(request, EMBEDDINGS)
        service = await self._service(request, body)
        vectors, _ = await _vectors(service, {"prompt": body.prompt} if body.prompt else {}, WHOLE_TEXT)
        return json_reply(Embedding([number for one in vectors for number in one.tolist()]))

    async def _service(self, request: Request, body: KeepingRequest) -> EmbeddingService:
        name, keep_alive = body.required_name(), body.keep_alive_seconds()
        return (await self._models.embedder(request, name, vectors=True, keep_alive=keep_alive)).service


async def _vectors(
    service: EmbeddingService, inputs: Mapping[str, str], truncate: int | None
) -> tuple[list[Tensor], int]:
    """Return the vector of each text, and the number of tokens of all texts."""
    sequences = await read_inputs(service, inputs, truncate)
    return await service.embed(sequences), sum(map(len, sequences))


def _encode_embeddings(body: EmbedRequest, vectors: Sequence[Tensor], tokens: int, seconds: float) -> bytes:
    numbers = [truncate(vector, body.dimensions).tolist() for vector in vectors]
    reply = Embedded(
        model=body.model_name, embeddings=numbers, total_duration=round(1e9 * seconds), prompt_eval_count=tokens
    )
    return msgspec.json.encode(reply)
