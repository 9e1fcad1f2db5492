"""Endpoints of Ollama's API for a model that generates text: each decodes a request and returns the response for it."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from app.generation.events import TokenCounts
from app.generation.service import ChatService
from app.server.dialects.ollama.errors import ERRORS, error_body
from app.server.dialects.ollama.fields import CHAT, GENERATE
from app.server.dialects.ollama.models import ModelEndpoints
from app.server.dialects.ollama.replies import (
    ChatReply,
    ChatWriter,
    DoneReason,
    GenerateReply,
    GenerateWriter,
    empty_chat_reply,
    empty_generate_reply,
    fold_chat,
    fold_generate,
    reply_chunks,
)
from app.server.dialects.ollama.requests import ChatRequest, GenerateRequest, GeneratingRequest
from app.server.http.endpoint import LINES, Endpoint
from app.server.http.errors import check_vocabulary
from app.server.http.reply import StreamedReply, WholeReply, json_reply
from app.server.http.request_body import read_body
from app.server.origin import origin_of
from app.server.served_models import ServedModels
from app.server.text_prompts import infill_prompt, text_prompt
from app.text.infilling import Gap


class OllamaEndpoints:
    """Endpoints that generate text, and those about models."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def endpoints(self) -> list[Endpoint]:
        endpoint = partial(Endpoint, framing=LINES, errors=ERRORS)
        turn, generated = "Generate the next message of a conversation", "Answer or continue a prompt"
        return [
            *ModelEndpoints(self._models).endpoints(),
            endpoint(
                "POST",
                "/api/chat",
                self.chat,
                turn,
                takes=ChatRequest,
                gives=ChatReply,
                streams=ChatReply,
            ),
            endpoint(
                "POST",
                "/api/generate",
                self.generate,
                generated,
                takes=GenerateRequest,
                gives=GenerateReply,
                streams=GenerateReply,
            ),
        ]

    async def chat(self, request: Request) -> StreamedReply[ChatReply] | WholeReply[ChatReply] | Response:
        body = await read_body(request, CHAT)
        body.check()
        if body.only_loads:
            return json_reply(empty_chat_reply(body.model_name, await self._load_or_unload(request, body)))
        service = await self._service(request, body)
        writer, counts = ChatWriter(body.model_name, service.tokenizer), TokenCounts()
        origin = origin_of(request, body.origin_fields())
        conversation, options = body.conversation(), body.generation_options(service.sampling)
        chunks = reply_chunks(service.reply(conversation, options, origin, counts), writer, counts, "messages")
        return StreamedReply(chunks, error_body, writer.framing()) if body.streams else WholeReply(chunks, fold_chat)

    async def generate(self, request: Request) -> StreamedReply[GenerateReply] | WholeReply[GenerateReply] | Response:
        body = await read_body(request, GENERATE)
        body.check()
        if body.only_loads:
            return json_reply(empty_generate_reply(body.model_name, await self._load_or_unload(request, body)))
        service = await self._service(request, body)
        reports_context, counts = not body.continues_text, TokenCounts()
        writer = GenerateWriter(body.model_name, service.tokenizer, reports_context=reports_context)
        origin = origin_of(request, body.origin_fields())
        options = body.generation_options(service.sampling)
        remedy = "Send the context of a reply of this model."
        check_vocabulary(body.context or (), service.vocab_size, "context", remedy)
        prompt = [await _prompt(service, body)] if body.continues_text else body.conversation()
        replies = service.reply(prompt, options, origin, counts)
        chunks = reply_chunks(replies, writer, counts, "context" if body.context else "prompt")
        return (
            StreamedReply(chunks, error_body, writer.framing()) if body.streams else WholeReply(chunks, fold_generate)
        )

    async def _service(self, request: Request, body: GeneratingRequest) -> ChatService:
        name, keep_alive = body.required_name(), body.keep_alive_seconds()
        fields = body.origin_fields()
        return (await self._models.chat(request, name, fields, streams=body.streams, keep_alive=keep_alive)).service

    async def _load_or_unload(self, request: Request, body: GeneratingRequest) -> DoneReason:
        """Load the model of a request without a prompt. If it is not to be kept, unload it instead."""
        if body.keep_alive_seconds() == 0:
            await self._models.unload(body.required_name())
            return "unload"
        await self._service(request, body)
        return "load"


async def _prompt(service: ChatService, body: GenerateRequest) -> tuple[int, ...]:
    if body.suffix:
        return await infill_prompt(service, Gap(body.prompt, body.suffix))
    return await text_prompt(service, body.prompt)
