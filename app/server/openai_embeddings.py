"""OpenAI's embeddings: texts or token ids in, vectors out; and what models answer that do the other thing only."""

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, NoReturn, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from app.embedding_service import EmbeddingService, shortened
from app.server.errors import InvalidRequest
from app.server.openai_models import ServedModel
from app.server.openai_requests import PositiveCount, Prompts, separate
from app.server.reply import while_connected
from app.server.request_body import read_body

EMBEDDINGS = "/v1/embeddings"
GENERATING = ("/v1/chat/completions", "/v1/completions")
MAX_INPUTS = 2048  # of one request, as in OpenAI's API

Encoding: TypeAlias = Literal["float", "base64"]


class EmbeddingRequest(Struct, kw_only=True):
    """POST /v1/embeddings."""

    model: Annotated[str, Meta(max_length=1024)]
    input: Prompts
    encoding_format: Encoding | None = None
    dimensions: PositiveCount | None = None
    user: str | None = None
    # Not in OpenAI's API: texts are cut to so many tokens, and with -1 to as many as the model reads.
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None

    def inputs(self) -> list[str | tuple[int, ...]]:
        """The inputs, each a text or token ids. Raises InvalidRequest."""
        inputs = separate(self.input, "input")
        if len(inputs) > MAX_INPUTS:
            problem = f"{len(inputs)} inputs are more than {MAX_INPUTS}."
            raise InvalidRequest(f"input: {problem}", "Send several requests.", parameter="input")
        for place, one in enumerate(inputs):
            if not one:
                raise _faulty(place, "it is empty")
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


class EmbeddingEndpoints:
    """Serves one embedding model."""

    def __init__(self, service: EmbeddingService, aliases: Mapping[str, str]) -> None:
        """`aliases` are further names of models: see `ServedModel`."""
        self._service = service
        self._model = ServedModel(service.name, service.context_length, service.vocab_size, aliases)
        self._decoder = msgspec.json.Decoder(EmbeddingRequest)

    def routes(self) -> list[Route]:
        return [
            *self._model.routes(),
            Route(EMBEDDINGS, self.create_embeddings, methods=["POST"]),
            *(Route(path, refuse_generation, methods=["POST"]) for path in GENERATING),
        ]

    async def create_embeddings(self, request: Request) -> Response:
        wanted = await read_body(request, self._decoder)
        self._model.check(wanted.model)
        self._check_dimensions(wanted.dimensions)
        inputs = wanted.inputs()
        body: list[bytes] = []

        async def answer() -> None:
            sequences = await self._sequences(inputs, wanted.truncate_prompt_tokens)
            vectors = await self._service.embed(sequences)
            # Thousands of numbers are written, which is not to stop the others' replies.
            tokens = sum(map(len, sequences))
            body.append(await asyncio.to_thread(_body, vectors, wanted, tokens))

        await while_connected(request.receive, answer())
        return Response(b"".join(body), media_type="application/json")

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is not None and dimensions > self._service.dimensions:
            problem = f"{dimensions} is more than the {self._service.dimensions} that the model's vectors have."
            raise InvalidRequest(f"dimensions: {problem}", parameter="dimensions")

    async def _sequences(self, inputs: Sequence[str | tuple[int, ...]], truncate: int | None) -> list[tuple[int, ...]]:
        """The ids of each input, all of which the model can read. Raises InvalidRequest naming one that it cannot."""
        longest = self._service.context_length
        most = truncate if truncate is None else min(longest, longest if truncate == -1 else truncate)
        texts = iter(await self._service.encode([one for one in inputs if isinstance(one, str)], most))
        sequences = [next(texts) if isinstance(one, str) else one[:most] for one in inputs]
        for place, ids in enumerate(sequences):
            if not ids:
                raise _faulty(place, "nothing is left of it")
            if most is not None and len(ids) > most:
                raise _faulty(place, f"the {len(ids)} tokens that the model puts around a text are more than {most}")
            if len(ids) > longest:
                problem = f"its {len(ids)} tokens are more than the {longest} that the model reads"
                raise _faulty(place, problem, code="context_length_exceeded")
            if max(ids) >= self._service.vocab_size:
                raise _faulty(place, f"token id {max(ids)} is not in the vocabulary of {self._service.vocab_size}")
        return sequences


def _faulty(place: int, problem: str, code: str = "") -> InvalidRequest:
    parameter = f"input[{place}]"
    remedy = "Send it in pieces, or have it cut with truncate_prompt_tokens: -1." if code else ""
    return InvalidRequest(f"{parameter}: {problem}", remedy, parameter=parameter, code=code)


def _body(vectors: Sequence[Tensor], wanted: EmbeddingRequest, tokens: int) -> bytes:
    write = _WRITERS[wanted.encoding_format or "float"]
    data = [Embedding(place, Raw(write(shortened(one, wanted.dimensions)))) for place, one in enumerate(vectors)]
    return msgspec.json.encode(EmbeddingList(data, wanted.model, EmbeddingUsage(tokens, tokens)))


def _as_numbers(vector: Tensor) -> bytes:
    return msgspec.json.encode(vector.tolist())


def _as_base64(vector: Tensor) -> bytes:
    """The numbers as float32, little endian."""
    return b'"' + base64.b64encode(vector.numpy().astype("<f4").tobytes()) + b'"'


_WRITERS: dict[Encoding, Callable[[Tensor], bytes]] = {"float": _as_numbers, "base64": _as_base64}


# -- what the other kind of model answers


class _AnyRequest(Struct):
    """A request of which nothing is read."""


_any_request = msgspec.json.Decoder(_AnyRequest)


async def refuse_embeddings(request: Request) -> NoReturn:
    """What a model that writes text answers to whoever wants vectors."""
    await read_body(request, _any_request)
    raise InvalidRequest(
        "This server's model writes text, and has no embeddings",
        "Serve an embedding model: ingle serve --model FOLDER, of all-MiniLM-L6-v2 or BGE for one.",
        parameter="model",
    )


async def refuse_generation(request: Request) -> NoReturn:
    """What an embedding model answers to whoever wants text."""
    await read_body(request, _any_request)
    raise InvalidRequest(
        "This server's model gives embeddings, and writes no text",
        f"Use POST {EMBEDDINGS}, or serve a model that chats: ingle serve.",
        parameter="model",
    )
