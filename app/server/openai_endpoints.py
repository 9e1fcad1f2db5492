"""The endpoints of OpenAI's API: from a request to the response that will carry its reply."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.chat.service import ChatService
from app.server import openai_chat, openai_completions
from app.server.errors import InvalidRequest
from app.server.openai_errors import error_body
from app.server.openai_requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from app.server.reply import ChunkT, StreamedReply, WholeReply
from app.server.request_body import read_body

RequestT = TypeVar("RequestT", bound=GenerationRequest)
Reply: TypeAlias = StreamedReply[ChunkT] | WholeReply[ChunkT]


class Model(Struct):
    id: str
    created: int
    context_length: int
    object: Literal["model"] = "model"
    owned_by: str = "inglenook"


class ModelList(Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class OpenAIEndpoints:
    """Serves one model."""

    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._model = Model(service.name, int(time.time()), service.context_length)
        self._chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
        self._completion_decoder = msgspec.json.Decoder(CompletionRequest)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.retrieve_model, methods=["GET"]),
            Route("/v1/chat/completions", self.create_chat_completion, methods=["POST"]),
            Route("/v1/completions", self.create_completion, methods=["POST"]),
        ]

    async def list_models(self, request: Request) -> Response:
        return _json(ModelList([self._model]))

    async def retrieve_model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return _json(self._model)

    async def create_chat_completion(self, request: Request) -> Reply[openai_chat.ChatCompletionChunk]:
        wanted = await self._read(request, self._chat_decoder)
        origin = wanted.origin(request.headers)
        return _reply(wanted, openai_chat.chunks(self._service, wanted, origin), openai_chat.fold)

    async def create_completion(self, request: Request) -> Reply[openai_completions.Completion]:
        wanted = await self._read(request, self._completion_decoder)
        origin = wanted.origin(request.headers)
        return _reply(wanted, openai_completions.chunks(self._service, wanted, origin), openai_completions.fold)

    async def _read(self, request: Request, decoder: "msgspec.json.Decoder[RequestT]") -> RequestT:
        wanted = await read_body(request, decoder)
        self._check_model(wanted.model)
        wanted.check()
        return wanted

    def _check_model(self, name: str) -> None:
        if name != self._service.name:
            message = f"The model {name!r} does not exist here"
            remedy = f"This server has {self._service.name!r}."
            raise InvalidRequest(message, remedy, parameter="model", code="model_not_found", status=404)


def _reply(
    wanted: GenerationRequest,
    chunks: AsyncGenerator[list[ChunkT]],
    fold: Callable[[AsyncGenerator[ChunkT]], Awaitable[Struct]],
) -> Reply[ChunkT]:
    return StreamedReply(chunks, error_body) if wanted.stream else WholeReply(chunks, fold)


def _json(body: Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
