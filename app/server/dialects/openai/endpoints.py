"""The endpoints of OpenAI's API: from a request to the response that will carry its reply."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request

from app.chat.service import ChatService
from app.server.dialects.openai import chat, completions
from app.server.dialects.openai.chat_requests import ChatCompletionRequest
from app.server.dialects.openai.embeddings import VECTORS
from app.server.dialects.openai.errors import error_body
from app.server.dialects.openai.models import ModelEndpoints
from app.server.dialects.openai.requests import CompletionRequest, GenerationRequest
from app.server.door import of_caller
from app.server.endpoint import Endpoint
from app.server.refusals import NO_VECTORS
from app.server.reply import ChunkT, StreamedReply, WholeReply
from app.server.request_body import read_body
from app.server.served_model import ServedModel

RequestT = TypeVar("RequestT", bound=GenerationRequest)
Reply: TypeAlias = StreamedReply[ChunkT] | WholeReply[ChunkT]


class OpenAIEndpoints:
    """Serves one model."""

    def __init__(self, service: ChatService, model: ServedModel) -> None:
        self._service = service
        self._model = model
        self._chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
        self._completion_decoder = msgspec.json.Decoder(CompletionRequest)

    def endpoints(self) -> list[Endpoint]:
        return [
            *ModelEndpoints(self._model).endpoints(),
            Endpoint(
                "POST",
                "/v1/chat/completions",
                self.create_chat_completion,
                "The next turn of a conversation",
                takes=ChatCompletionRequest,
                gives=chat.ChatCompletion,
                streams=chat.ChatCompletionChunk,
            ),
            Endpoint(
                "POST",
                "/v1/completions",
                self.create_completion,
                "What a text goes on with, or what is missing in its middle",
                takes=CompletionRequest,
                gives=completions.Completion,
                streams=completions.Completion,
            ),
            *NO_VECTORS.endpoints(VECTORS),
        ]

    async def create_chat_completion(self, request: Request) -> Reply[chat.ChatCompletionChunk]:
        wanted = await self._read(request, self._chat_decoder)
        origin = of_caller(request, wanted.origin(request.headers))
        return _reply(wanted, chat.chunks(self._service, wanted, origin), chat.fold)

    async def create_completion(self, request: Request) -> Reply[completions.Completion]:
        wanted = await self._read(request, self._completion_decoder)
        origin = of_caller(request, wanted.origin(request.headers))
        return _reply(wanted, completions.chunks(self._service, wanted, origin), completions.fold)

    async def _read(self, request: Request, decoder: "msgspec.json.Decoder[RequestT]") -> RequestT:
        wanted = await read_body(request, decoder)
        wanted.check_model(self._model)
        wanted.check()
        return wanted


def _reply(
    wanted: GenerationRequest,
    chunks: AsyncGenerator[list[ChunkT]],
    fold: Callable[[AsyncGenerator[ChunkT]], Awaitable[Struct]],
) -> Reply[ChunkT]:
    return StreamedReply(chunks, error_body) if wanted.stream else WholeReply(chunks, fold)
