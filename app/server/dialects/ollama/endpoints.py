"""Endpoints of Ollama's API for a model that generates text: each decodes a request and returns the response for it."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from app.generation.events import TokenCounts
from app.generation.generic_tools import ToolSupport
from app.generation.service import ChatService
from app.server.dialects.ollama.embeddings import VECTORS
from app.server.dialects.ollama.errors import ERRORS, error_body
from app.server.dialects.ollama.fields import CHAT, GENERATE
from app.server.dialects.ollama.models import ModelEndpoints, check_model
from app.server.dialects.ollama.replies import (
    ChatReply,
    ChatWriter,
    GenerateReply,
    GenerateWriter,
    fold_chat,
    fold_generate,
    reply_chunks,
)
from app.server.dialects.ollama.requests import ChatRequest, GenerateRequest
from app.server.http.endpoint import LINES, Endpoint
from app.server.http.errors import check_vocabulary
from app.server.http.reply import StreamedReply, WholeReply, json_reply
from app.server.http.request_body import read_body
from app.server.origin import origin_of
from app.server.refusals import NO_VECTORS
from app.server.served_model import ServedModel
from app.server.text_prompts import infill_prompt, text_prompt
from app.text.infilling import Gap


class OllamaEndpoints:
    """Endpoints of one model."""

    def __init__(self, service: ChatService, model: ServedModel) -> None:
        self._service = service
        self._model = model

    def endpoints(self) -> list[Endpoint]:
        endpoint = partial(Endpoint, framing=LINES, errors=ERRORS)
        turn, generated = "Generate the next message of a conversation", "Answer or continue a prompt"
        return [
            *ModelEndpoints(
                self._model, self._capabilities, self._service.tokenizer.chat_template, self._service.sampling
            ).endpoints(),
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
            *NO_VECTORS.endpoints(VECTORS, ERRORS),
        ]

    async def chat(self, request: Request) -> StreamedReply[ChatReply] | WholeReply[ChatReply] | Response:
        body = await read_body(request, CHAT)
        check_model(self._model, body)
        body.check()
        writer, counts = ChatWriter(body.model_name, self._service.tokenizer), TokenCounts()
        if body.only_loads:
            return json_reply(writer.end("load"))
        origin = origin_of(request, body.origin_fields())
        conversation, options = body.conversation(), body.generation_options(self._service.sampling)
        chunks = reply_chunks(self._service.reply(conversation, options, origin, counts), writer, counts, "messages")
        return StreamedReply(chunks, error_body, writer.framing()) if body.streams else WholeReply(chunks, fold_chat)

    async def generate(self, request: Request) -> StreamedReply[GenerateReply] | WholeReply[GenerateReply] | Response:
        body = await read_body(request, GENERATE)
        check_model(self._model, body)
        body.check()
        reports_context, counts = not body.continues_text, TokenCounts()
        writer = GenerateWriter(body.model_name, self._service.tokenizer, reports_context=reports_context)
        if body.only_loads:
            return json_reply(writer.end("load"))
        origin = origin_of(request, body.origin_fields())
        options = body.generation_options(self._service.sampling)
        remedy = "Send the context of a reply of this model."
        check_vocabulary(body.context or (), self._service.vocab_size, "context", remedy)
        prompt = [await self._prompt(body)] if body.continues_text else body.conversation()
        replies = self._service.reply(prompt, options, origin, counts)
        chunks = reply_chunks(replies, writer, counts, "context" if body.context else "prompt")
        return (
            StreamedReply(chunks, error_body, writer.framing()) if body.streams else WholeReply(chunks, fold_generate)
        )

    async def _prompt(self, body: GenerateRequest) -> tuple[int, ...]:
        if body.suffix:
            return await infill_prompt(self._service, Gap(body.prompt, body.suffix))
        return await text_prompt(self._service, body.prompt)

    async def _capabilities(self) -> list[str]:
        capabilities = await self._service.capabilities()
        abilities_by_name = {
            "tools": capabilities.tools,
            "insert": capabilities.insertion,
            "thinking": capabilities.thinking,
            # an extension of this server: tools are described in the prompt
            "generic_tools": capabilities.tool_support is ToolSupport.GENERIC,
        }
        return ["completion", *(name for name, is_able in abilities_by_name.items() if is_able)]
