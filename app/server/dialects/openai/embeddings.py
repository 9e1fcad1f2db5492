"""OpenAI's embeddings: texts or token ids in, vectors out."""

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from app.embedding_service import EmbeddingService, shortened
from app.server.dialects.openai.chat_requests import ChatCompletionRequest
from app.server.dialects.openai.models import ModelEndpoints
from app.server.dialects.openai.requests import CompletionRequest, Prompts, separate
from app.server.dialects.rerank import PATHS as RERANKING
from app.server.dialects.rerank import RerankEndpoints, RerankRequest
from app.server.embedding_inputs import MAX_INPUTS, Truncation, check_dimensions, faulty, read_inputs
from app.server.endpoint import Endpoint
from app.server.errors import InvalidRequest
from app.server.field_types import ModelName, PositiveCount
from app.server.refusals import NO_TEXT, RANKS_ONLY
from app.server.reply import while_connected
from app.server.request_body import read_body
from app.server.served_model import ServedModel

EMBEDDINGS = "/v1/embeddings"
GENERATING: Mapping[str, type[Struct]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}

Encoding: TypeAlias = Literal["float", "base64"]


class EmbeddingRequest(Struct, kw_only=True):
    """POST /v1/embeddings."""

    model: ModelName | None = None
    input: Prompts
    encoding_format: Encoding | None = None
    dimensions: PositiveCount | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncation | None = None  # not in OpenAI's API, but in vLLM's

    def inputs(self) -> list[str | tuple[int, ...]]:
        """The inputs, each a text or token ids. Raises InvalidRequest."""
        inputs = separate(self.input, "input")
        if len(inputs) > MAX_INPUTS:
            problem = f"{len(inputs)} inputs are more than {MAX_INPUTS}."
            raise InvalidRequest(f"input: {problem}", "Send several requests.", parameter="input")
        for place, one in enumerate(inputs):
            if not one:
                raise faulty(f"input[{place}]", "it is empty")
        return inputs


class Embedding(Struct):
    index: int
    embedding: Raw  # a list of numbers, or their bytes in base64
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


# What is asked of a model that gives vectors, for one that does not to refuse.
VECTORS: Mapping[str, type[Struct]] = {EMBEDDINGS: EmbeddingRequest, **dict.fromkeys(RERANKING, RerankRequest)}


class EmbeddingEndpoints:
    """Serves one embedding model."""

    def __init__(self, service: EmbeddingService, model: ServedModel) -> None:
        self._service = service
        self._model = model
        self._decoder = msgspec.json.Decoder(EmbeddingRequest)

    def endpoints(self) -> list[Endpoint]:
        return [
            *ModelEndpoints(self._model).endpoints(),
            *self._embeddings(),
            *RerankEndpoints(self._service, self._model).endpoints(),
            *NO_TEXT.endpoints(GENERATING),
        ]

    def _embeddings(self) -> list[Endpoint]:
        if self._service.ranks:
            return RANKS_ONLY.endpoints({EMBEDDINGS: EmbeddingRequest})
        summary, answer = "Texts become vectors", self.create_embeddings
        return [Endpoint("POST", EMBEDDINGS, answer, summary, takes=EmbeddingRequest, gives=EmbeddingList)]

    async def create_embeddings(self, request: Request) -> Response:
        wanted = await read_body(request, self._decoder)
        model = self._model.named(wanted.model)
        check_dimensions(self._service, wanted.dimensions)
        inputs = wanted.inputs()
        body: list[bytes] = []

        async def answer() -> None:
            named = {f"input[{place}]": one for place, one in enumerate(inputs)}
            sequences = await read_inputs(self._service, named, wanted.truncate_prompt_tokens)
            vectors = await self._service.embed(sequences)
            # Thousands of numbers are written, which is not to stop the others' replies.
            tokens = sum(map(len, sequences))
            body.append(await asyncio.to_thread(_body, vectors, wanted, model, tokens))

        await while_connected(request.receive, answer())
        return Response(b"".join(body), media_type="application/json")


def _body(vectors: Sequence[Tensor], wanted: EmbeddingRequest, model: str, tokens: int) -> bytes:
    write = _WRITERS[wanted.encoding_format or "float"]
    data = [Embedding(place, Raw(write(shortened(one, wanted.dimensions)))) for place, one in enumerate(vectors)]
    return msgspec.json.encode(EmbeddingList(data, model, EmbeddingUsage(tokens, tokens)))


def _as_numbers(vector: Tensor) -> bytes:
    return msgspec.json.encode(vector.tolist())


def _as_base64(vector: Tensor) -> bytes:
    """The numbers as float32, little endian."""
    return b'"' + base64.b64encode(vector.numpy().astype("<f4").tobytes()) + b'"'


_WRITERS: dict[Encoding, Callable[[Tensor], bytes]] = {"float": _as_numbers, "base64": _as_base64}
