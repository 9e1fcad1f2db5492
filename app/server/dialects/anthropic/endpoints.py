"""Endpoints of Anthropic's API: each decodes a request and returns the response for its reply."""

from typing import TypeAlias

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from app.generation.events import TokenCounts
from app.server.dialects.anthropic import messages
from app.server.dialects.anthropic.changing_lines import CHANGING_LINES, KEEP_ALL_LINES
from app.server.dialects.anthropic.errors import ERRORS, error_body
from app.server.dialects.anthropic.fields import MESSAGES, TOKEN_COUNT
from app.server.dialects.anthropic.requests import MessageRequest, TokenCountRequest
from app.server.http.endpoint import Endpoint
from app.server.http.errors import convert_errors
from app.server.http.reply import StreamedReply, WholeReply, json_reply
from app.server.http.request_body import read_body
from app.server.origin import origin_of
from app.server.served_models import ServedModels

Reply: TypeAlias = StreamedReply[messages.Event] | WholeReply[messages.Event]


class TokenCount(Struct):
    input_tokens: int


class AnthropicEndpoints:
    """Endpoints that generate messages."""

    def __init__(self, models: ServedModels, *, keep_changing_lines: bool = False) -> None:
        """Set the models. With `keep_changing_lines`, prompts keep lines that change with every request."""
        self._models = models
        self._changing_lines = KEEP_ALL_LINES if keep_changing_lines else CHANGING_LINES

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "POST",
                "/v1/messages",
                self.create_message,
                "Generate the next message of a conversation",
                takes=MessageRequest,
                gives=messages.MessageReply,
                streams=messages.Event,
                framing=messages.FRAMING,
                errors=ERRORS,
            ),
            Endpoint(
                "POST",
                "/v1/messages/count_tokens",
                self.count_tokens,
                "Count the tokens of a prompt",
                takes=TokenCountRequest,
                gives=TokenCount,
                errors=ERRORS,
            ),
        ]

    async def create_message(self, request: Request) -> Reply:
        body = await read_body(request, MESSAGES)
        fields = body.origin_fields()
        origin = origin_of(request, fields)
        conversation = body.conversation(self._changing_lines)
        served = await self._models.chat(request, body.model, fields, streams=bool(body.stream))
        options = body.generation_options(served.service.sampling)
        counts = TokenCounts()
        replies = served.service.reply(conversation, options, origin, counts)
        events = messages.events(replies, served.name, counts)
        if body.stream:
            return StreamedReply(events, error_body, messages.FRAMING)
        return WholeReply(events, messages.fold)

    async def count_tokens(self, request: Request) -> Response:
        body = await read_body(request, TOKEN_COUNT)
        conversation = body.conversation(self._changing_lines)
        served = await self._models.chat(request, body.model)
        with convert_errors("messages"):
            prompt = await served.service.prompt(conversation)
        return json_reply(TokenCount(len(prompt.ids)))
