"""OpenAI's embeddings: the endpoint and the list of vectors."""

import base64
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from app.generation.embedding_service import truncate
from app.server.dialects.openai.embedding_requests import EmbeddingRequest, Encoding
from app.server.dialects.openai.fields import EMBEDDINGS as EMBEDDING_FIELDS
from app.server.dialects.rerank import RerankEndpoints
from app.server.embedding_inputs import check_dimensions, read_inputs
from app.server.http.endpoint import Endpoint
from app.server.http.reply import json_reply_on_thread
from app.server.http.request_body import read_body
from app.server.served_models import ServedModels

EMBEDDINGS = "/v1/embeddings"
BARE_EMBEDDINGS = "/embeddings"  # llama.cpp's path, which returns a list; requests with an encoding get OpenAI's reply


class Embedding(Struct):
    index: int
    embedding: Raw  # a list of numbers, or a base64 string
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class BareEmbedding(Struct):
    """A vector in the reply of llama.cpp's path. The list has one entry, the vector of the whole text."""

    index: int
    embedding: list[Raw]


class EmbeddingEndpoints:
    """Endpoints that compute vectors, and those that rank documents."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def endpoints(self) -> list[Endpoint]:
        return [*self._embeddings(), *RerankEndpoints(self._models).endpoints()]

    def _embeddings(self) -> list[Endpoint]:
        summary, answers = (
            "Compute the vectors of texts",
            {EMBEDDINGS: self.create_embeddings, BARE_EMBEDDINGS: self.create_bare},
        )
        gives = {EMBEDDINGS: EmbeddingList, BARE_EMBEDDINGS: EmbeddingList | list[BareEmbedding]}
        return [
            Endpoint("POST", path, answer, summary, takes=EmbeddingRequest, gives=gives[path])
            for path, answer in answers.items()
        ]

    async def create_embeddings(self, request: Request) -> Response:
        return await self._answer(request, await read_body(request, EMBEDDING_FIELDS), _list_body)

    async def create_bare(self, request: Request) -> Response:
        """Reply in OpenAI's format if the request names an encoding, as OpenAI's libraries always do.

        Otherwise, reply in llama.cpp's format.
        """
        body = await read_body(request, EMBEDDING_FIELDS)
        return await self._answer(request, body, _bare_body if body.encoding_format is None else _list_body)

    async def _answer(self, request: Request, body: EmbeddingRequest, write: "Write") -> Response:
        served = await self._models.embedder(request, body.model, vectors=True, keep_alive=body.ttl)
        service, model = served.service, served.name
        check_dimensions(service, body.dimensions)
        named = {f"input[{index}]": one for index, one in enumerate(body.inputs())}
        sequences = await read_inputs(service, named, body.truncate_prompt_tokens)
        vectors, tokens = await service.embed(sequences), sum(map(len, sequences))
        return await json_reply_on_thread(
            service.texts, lambda _: write(_encoded_vectors(vectors, body), model, tokens)
        )


def _encoded_vectors(vectors: Sequence[Tensor], body: EmbeddingRequest) -> Iterator[Raw]:
    write = _WRITERS[body.encoding_format or "float"]
    return (Raw(write(truncate(one, body.dimensions))) for one in vectors)


# function that encodes a reply from the vectors, the model's name, and the number of tokens
Write: TypeAlias = Callable[[Iterator[Raw], str, int], bytes]


def _list_body(vectors: Iterator[Raw], model: str, tokens: int) -> bytes:
    data = [Embedding(index, vector) for index, vector in enumerate(vectors)]
    return msgspec.json.encode(EmbeddingList(data, model, EmbeddingUsage(tokens, tokens)))


def _bare_body(vectors: Iterator[Raw], model: str, tokens: int) -> bytes:
    return msgspec.json.encode([BareEmbedding(index, [vector]) for index, vector in enumerate(vectors)])


def _as_numbers(vector: Tensor) -> bytes:
    return msgspec.json.encode(vector.tolist())


def _as_base64(vector: Tensor) -> bytes:
    """Encode the numbers as little-endian float32 in base64."""
    return b'"' + base64.b64encode(vector.numpy().astype("<f4").tobytes()) + b'"'


_WRITERS: dict[Encoding, Callable[[Tensor], bytes]] = {"float": _as_numbers, "base64": _as_base64}
