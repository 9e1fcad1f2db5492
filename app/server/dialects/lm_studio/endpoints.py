"""LM Studio's endpoints: lists of models, its own chat, and OpenAI's endpoints with its statistics.

LM Studio's SDKs use an undocumented WebSocket protocol; its routes return an error that says so.
"""

from collections.abc import Mapping
from typing import NoReturn

from msgspec import Struct
from starlette.requests import Request

from app.generation.service import ChatService
from app.server.dialects.lm_studio import chat
from app.server.dialects.lm_studio.errors import ERRORS
from app.server.dialects.lm_studio.fields import CHAT
from app.server.dialects.lm_studio.models import ModelEndpoints
from app.server.dialects.lm_studio.requests import ChatRequest
from app.server.dialects.lm_studio.stats import ChatWithStats, CompletionWithStats, with_stats
from app.server.dialects.openai.chat import ChatCompletionChunk
from app.server.dialects.openai.chat_requests import ChatCompletionRequest
from app.server.dialects.openai.completion_requests import CompletionRequest
from app.server.dialects.openai.completions import Completion
from app.server.dialects.openai.embedding_requests import EmbeddingRequest
from app.server.dialects.openai.embeddings import EmbeddingEndpoints, EmbeddingList
from app.server.dialects.openai.endpoints import OpenAIEndpoints
from app.server.dialects.responses.endpoints import ResponseEndpoints
from app.server.http.endpoint import NAMED_EVENTS, Endpoint
from app.server.http.errors import InvalidRequest
from app.server.http.reply import StreamedReply, WholeReply
from app.server.http.request_body import read_body
from app.server.refusals import NO_TEXT, NO_VECTORS, RANKS_ONLY
from app.server.served_model import ServedModel

GREETING = "/lmstudio-greeting"
# Paths of the WebSocket protocol, one for each of its parts.
NAMESPACES = ("/llm", "/system", "/files", "/repository", "/diagnostics", "/plugins", "/runtime")


def _protocol_endpoints() -> list[Endpoint]:
    """Return endpoints that refuse the WebSocket protocol."""
    refused = "Refused: use OpenAI's API, or LM Studio's REST API"
    return [Endpoint("GET", path, _refuse, refused) for path in (GREETING, *NAMESPACES, "/embedding")]


async def _refuse(request: Request) -> NoReturn:
    problem = "This server does not speak the WebSocket protocol of LM Studio's SDKs"
    remedy = "Use an OpenAI client with the base URL /v1, or LM Studio's REST API at /api/v1."
    raise InvalidRequest(problem, remedy, status=501)


CHAT_PATH, CHAT_COMPLETIONS, COMPLETIONS = "/api/v1/chat", "/api/v0/chat/completions", "/api/v0/completions"
EMBEDDINGS = "/api/v0/embeddings"
GENERATING: Mapping[str, type[Struct]] = {
    CHAT_PATH: ChatRequest,
    CHAT_COMPLETIONS: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
}
VECTORS: Mapping[str, type[Struct]] = {EMBEDDINGS: EmbeddingRequest}


class LMStudioEndpoints:
    """Endpoints of one model that generates text."""

    def __init__(
        self, service: ChatService, model: ServedModel, openai: OpenAIEndpoints, responses: ResponseEndpoints
    ) -> None:
        """Set the model, `openai`, which generates the replies, and `responses`, which stores the chats."""
        self._service = service
        self._model = model
        self._openai = openai
        self._responses = responses

    def endpoints(self) -> list[Endpoint]:
        goes_on, turn = "Continue text", "Generate the next message of a conversation"
        return [
            *ModelEndpoints(self._model, "llm", self._capabilities).endpoints(),
            Endpoint(
                "POST",
                CHAT_PATH,
                self.chat,
                turn,
                takes=ChatRequest,
                gives=chat.ChatReply,
                streams=chat.Event,
                framing=NAMED_EVENTS,
                errors=ERRORS,
            ),
            Endpoint(
                "POST",
                CHAT_COMPLETIONS,
                with_stats(self._openai.create_chat_completion, self._model, ChatWithStats),
                turn,
                takes=ChatCompletionRequest,
                gives=ChatWithStats,
                streams=ChatCompletionChunk,
            ),
            Endpoint(
                "POST",
                COMPLETIONS,
                with_stats(self._openai.create_completion, self._model, CompletionWithStats),
                goes_on,
                takes=CompletionRequest,
                gives=CompletionWithStats,
                streams=Completion,
            ),
            *NO_VECTORS.endpoints(VECTORS),
            *_protocol_endpoints(),
        ]

    async def chat(self, request: Request) -> StreamedReply[chat.Event] | WholeReply[chat.Event]:
        body = await read_body(request, CHAT)
        self._model.check(body.model)
        previous_instructions = await self._responses.instructions_of(request, body.previous_response_id)
        reply, earlier = await self._responses.start_reply(request, body.response_request(previous_instructions))
        chunks = chat.chat_events(reply, earlier, self._model.reply_name(body.model))
        return StreamedReply(chunks, chat.failure, NAMED_EVENTS) if body.stream else WholeReply(chunks, chat.fold)

    async def _capabilities(self) -> list[str]:
        return ["tool_use"] if (await self._service.capabilities()).tools else []


def embedding_endpoints(model: ServedModel, openai: EmbeddingEndpoints, *, ranks: bool) -> list[Endpoint]:
    """Return the endpoints of a model that returns vectors, or that ranks documents if `ranks`."""

    async def capabilities() -> list[str]:
        return []

    embeds = Endpoint(
        "POST",
        EMBEDDINGS,
        openai.create_embeddings,
        "Compute the vectors of texts",
        takes=EmbeddingRequest,
        gives=EmbeddingList,
    )
    return [
        *ModelEndpoints(model, "embeddings", capabilities).endpoints(),
        *(RANKS_ONLY.endpoints(VECTORS) if ranks else [embeds]),
        *NO_TEXT.endpoints(GENERATING),
        *_protocol_endpoints(),
    ]
