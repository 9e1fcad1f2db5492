"""LM Studio's endpoints: lists of models, its own chat, and OpenAI's endpoints with its statistics.

LM Studio's SDKs use an undocumented WebSocket protocol; its routes return an error that says so.
"""

from typing import NoReturn

from starlette.requests import Request

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
from app.server.served_models import ServedModels

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


class LMStudioEndpoints:
    """Endpoints that generate text or vectors, and those about models."""

    def __init__(
        self,
        models: ServedModels,
        openai: OpenAIEndpoints,
        embeddings: EmbeddingEndpoints,
        responses: ResponseEndpoints,
    ) -> None:
        """Set the models, `openai` and `embeddings`, which compute the replies, and `responses`, which stores chats."""
        self._models = models
        self._openai = openai
        self._embeddings = embeddings
        self._responses = responses

    def endpoints(self) -> list[Endpoint]:
        goes_on, turn = "Continue text", "Generate the next message of a conversation"
        return [
            *ModelEndpoints(self._models).endpoints(),
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
                with_stats(self._openai.create_chat_completion, self._models, ChatWithStats),
                turn,
                takes=ChatCompletionRequest,
                gives=ChatWithStats,
                streams=ChatCompletionChunk,
            ),
            Endpoint(
                "POST",
                COMPLETIONS,
                with_stats(self._openai.create_completion, self._models, CompletionWithStats),
                goes_on,
                takes=CompletionRequest,
                gives=CompletionWithStats,
                streams=Completion,
            ),
            Endpoint(
                "POST",
                EMBEDDINGS,
                self._embeddings.create_embeddings,
                "Compute the vectors of texts",
                takes=EmbeddingRequest,
                gives=EmbeddingList,
            ),
            *_protocol_endpoints(),
        ]

    async def chat(self, request: Request) -> StreamedReply[chat.Event] | WholeReply[chat.Event]:
        body = await read_body(request, CHAT)
        previous_instructions = await self._responses.instructions_of(request, body.previous_response_id)
        load = chat.LoadEvents(self._models, body.model)
        reply, earlier = await self._responses.start_reply(request, body.response_request(previous_instructions), load)
        chunks = chat.chat_events(reply, earlier, has_started=load.has_started)
        return StreamedReply(chunks, chat.failure, NAMED_EVENTS) if body.stream else WholeReply(chunks, chat.fold)
