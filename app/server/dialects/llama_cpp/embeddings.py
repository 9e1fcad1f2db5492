"""Vectors of texts and token ids, as llama.cpp's own endpoint returns them."""

from collections.abc import Mapping, Sequence

import msgspec
import torch
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from app.server.dialects.llama_cpp.errors import ERRORS
from app.server.dialects.llama_cpp.fields import EMBEDDING
from app.server.dialects.llama_cpp.token_requests import EmbeddingRequest
from app.server.embedding_inputs import MAX_INPUTS, read_inputs
from app.server.http.endpoint import Endpoint
from app.server.http.errors import InvalidRequest
from app.server.http.reply import json_reply_on_thread
from app.server.http.request_body import read_body
from app.server.served_models import ServedModels

PATH = "/embedding"
# Path -> type of the request body, for paths that a model without vectors refuses.
VECTORS: Mapping[str, type[Struct]] = {PATH: EmbeddingRequest}

EUCLIDEAN = 2
NONE = -1  # vectors are not normalized
LARGEST = 0  # the largest number becomes LARGEST_NUMBER
LARGEST_NUMBER = 32760


class Vector(Struct):
    index: int
    embedding: list[list[float]]  # a list with one vector, that of the whole text


class LlamaCppEmbeddingEndpoints:
    """The endpoint that computes vectors."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "POST",
                PATH,
                self.embed,
                "Compute the vectors of texts",
                takes=EmbeddingRequest,
                gives=list[Vector],
                errors=ERRORS,
            )
        ]

    async def embed(self, request: Request) -> Response:
        body = await read_body(request, EMBEDDING)
        norm, inputs = EUCLIDEAN if body.embd_normalize is None else body.embd_normalize, body.inputs()
        if norm == NONE:
            problem = "embd_normalize: this version returns normalized vectors only"
            raise InvalidRequest(problem, "Send 0 or more, or leave it out.", parameter="embd_normalize")
        if len(inputs) > MAX_INPUTS:
            problem = f"content: {len(inputs)} inputs exceed the limit of {MAX_INPUTS}"
            raise InvalidRequest(problem, "Send several requests.", parameter="content")
        service = (await self._models.embedder(request, body.model, vectors=True)).service
        vectors = await service.embed(await read_inputs(service, inputs, None))
        return await json_reply_on_thread(service.texts, lambda _: _encode_vectors(vectors, norm))


def _encode_vectors(vectors: Sequence[Tensor], norm: int) -> bytes:
    return msgspec.json.encode([Vector(index, [normalized(one, norm).tolist()]) for index, one in enumerate(vectors)])


def normalized(vector: Tensor, norm: int) -> Tensor:
    """Scale a vector of length 1 to another norm."""
    if norm == EUCLIDEAN:
        return vector
    if norm == LARGEST:
        return vector / vector.abs().max() * LARGEST_NUMBER
    length: Tensor = torch.linalg.vector_norm(vector, ord=norm)
    return vector / length
