"""Endpoints of OpenAI's API: each decodes a request and returns the response for its reply.

Most paths also exist without /v1: clients of llama.cpp's server use those.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeAlias, TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from app.generation.events import TokenCounts
from app.generation.service import ChatService
from app.server.dialects.openai import chat, completions
from app.server.dialects.openai.chat_requests import ChatCompletionRequest
from app.server.dialects.openai.completion_requests import CompletionRequest
from app.server.dialects.openai.errors import error_body
from app.server.dialects.openai.fields import CHAT, COMPLETION
from app.server.dialects.openai.models import ModelEndpoints
from app.server.dialects.openai.reports import Identity
from app.server.dialects.openai.requests import GenerationRequest
from app.server.http.endpoint import Endpoint
from app.server.http.errors import convert_errors
from app.server.http.holds import EarlyEvents
from app.server.http.reply import ChunkT, StreamedReply, WholeReply, json_reply
from app.server.http.request_body import read_body
from app.server.origin import origin_of
from app.server.request_fields import FieldTable
from app.server.served_models import Served, ServedModels

CHATS = ("/v1/chat/completions", "/chat/completions")
COMPLETIONS = "/v1/completions"  # the path without /v1 belongs to llama.cpp's API

RequestT = TypeVar("RequestT", bound=GenerationRequest)
Reply: TypeAlias = StreamedReply[ChunkT] | WholeReply[ChunkT]


class InputTokens(Struct):
    """The number of tokens in the prompt of a chat completion."""

    input_tokens: int
    object: str = "chat.completion.input_tokens"


class OpenAIEndpoints:
    """Endpoints that generate text."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def endpoints(self) -> list[Endpoint]:
        return [
            *ModelEndpoints(self._models).endpoints(),
            *map(self._chat, CHATS),
            *map(self._count, CHATS),
            Endpoint(
                "POST",
                COMPLETIONS,
                self.create_completion,
                "Continue text, or fill in its middle",
                takes=CompletionRequest,
                gives=completions.Completion,
                streams=completions.Completion,
            ),
        ]

    def _chat(self, path: str) -> Endpoint:
        return Endpoint(
            "POST",
            path,
            self.create_chat_completion,
            "Generate the next message of a conversation",
            takes=ChatCompletionRequest,
            gives=chat.ChatCompletion,
            streams=chat.ChatCompletionChunk,
        )

    def _count(self, path: str) -> Endpoint:
        return Endpoint(
            "POST",
            f"{path}/input_tokens",
            self.count_input_tokens,
            "Count the tokens of a conversation's prompt",
            takes=ChatCompletionRequest,
            gives=InputTokens,
        )

    async def create_chat_completion(self, request: Request) -> Reply[chat.ChatCompletionChunk]:
        body = await self._read(request, CHAT)
        load = chat.LoadChunks(self._models, body) if body.return_progress else None
        served, counts = await self._served(request, body, load), TokenCounts()
        started = None if load is None else load.identity
        identity = started or Identity.new(chat.ID_PREFIX, served.name, body.request_id)
        origin = origin_of(request, body.origin_fields(), identity.id)
        chunks = chat.chunks(served.service, body, identity, origin, counts)
        return _reply(body, chunks, chat.fold, counts)

    async def count_input_tokens(self, request: Request) -> Response:
        body = await self._read(request, CHAT)
        served = await self._served(request, body)
        with convert_errors("messages"):
            return json_reply(InputTokens(await served.service.count_tokens(body.conversation())))

    async def create_completion(self, request: Request) -> Reply[completions.Completion]:
        body = await self._read(request, COMPLETION)
        served = await self._served(request, body)
        identity, counts = Identity.new("cmpl", served.name, body.request_id), TokenCounts()
        origin = origin_of(request, body.origin_fields())
        chunks = completions.chunks(served.service, body, identity, origin, counts)
        return _reply(body, chunks, completions.fold, counts)

    async def _read(self, request: Request, fields: FieldTable[RequestT]) -> RequestT:
        """Return the validated body of a request."""
        body = await read_body(request, fields)
        body.check()
        return body

    async def _served(
        self, request: Request, body: GenerationRequest, events: EarlyEvents | None = None
    ) -> Served[ChatService]:
        return await self._models.chat(
            request,
            body.model,
            body.origin_fields(),
            streams=bool(body.stream),
            events=events,
            keep_alive=body.ttl,
        )


def _reply(
    body: GenerationRequest,
    chunks: AsyncGenerator[list[ChunkT]],
    fold: Callable[[AsyncGenerator[ChunkT]], Awaitable[Struct]],
    counts: TokenCounts,
) -> Reply[ChunkT]:
    return StreamedReply(chunks, error_body, counts=counts) if body.stream else WholeReply(chunks, fold)
