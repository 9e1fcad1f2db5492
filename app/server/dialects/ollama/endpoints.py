"""The endpoints of Ollama's API for a model that writes text: from a request to the response that carries its reply."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from app.generation.generic_tools import ToolSupport
from app.generation.model_replies import ChatPrompt
from app.generation.service import ChatService
from app.server.choices import WantedChoices
from app.server.continuation import Continuation, continuation_events, infill_prompt, text_prompt
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
    written,
)
from app.server.dialects.ollama.requests import ChatRequest, GenerateRequest, GeneratingRequest
from app.server.endpoint import LINES, Endpoint
from app.server.errors import check_vocabulary, naming
from app.server.http.access_middleware import of_caller
from app.server.http.reply import StreamedReply, WholeReply, json_reply
from app.server.http.request_body import read_body
from app.server.refusals import NO_VECTORS
from app.server.served_model import ServedModel
from app.server.turn import Turn, turn_events
from app.server.usage import TokenCounts
from app.text.infilling import Gap


class OllamaEndpoints:
    """Serves one model."""

    def __init__(self, service: ChatService, model: ServedModel) -> None:
        self._service = service
        self._model = model

    def endpoints(self) -> list[Endpoint]:
        endpoint = partial(Endpoint, framing=LINES, errors=ERRORS)
        turn, generated = "The next turn of a conversation", "An answer to a prompt, or what it goes on with"
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
        wanted = await read_body(request, CHAT)
        check_model(self._model, wanted)
        wanted.check()
        writer, counts = ChatWriter(wanted.asked_for, self._service.tokenizer), TokenCounts()
        if wanted.is_probe:
            return json_reply(writer.end("load"))
        origin = of_caller(request, wanted.origin(request.headers))
        turn = Turn(wanted.conversation(), await self._choices(wanted), wanted.grammar())
        chunks = written(turn_events(self._service, turn, origin, counts), writer, counts)
        return StreamedReply(chunks, error_body, writer.framing()) if wanted.streams else WholeReply(chunks, fold_chat)

    async def generate(self, request: Request) -> StreamedReply[GenerateReply] | WholeReply[GenerateReply] | Response:
        wanted = await read_body(request, GENERATE)
        check_model(self._model, wanted)
        wanted.check()
        tokenizer, counts = self._service.tokenizer, TokenCounts()
        writer = GenerateWriter(wanted.asked_for, tokenizer)
        if wanted.is_probe:
            return json_reply(writer.end("load"))
        origin = of_caller(request, wanted.origin(request.headers))
        choices = await self._choices(wanted)
        if wanted.continues_text:
            continuation = Continuation([await self._prompt(wanted)], choices, wanted.grammar())
            events = continuation_events(self._service, continuation, origin, counts)
        else:
            prompt = await self._chat_prompt(wanted)
            writer = GenerateWriter(wanted.asked_for, tokenizer, prompt.ids)
            turn = Turn(wanted.conversation(), choices, wanted.grammar(), field="prompt", prompt=prompt)
            events = turn_events(self._service, turn, origin, counts)
        chunks = written(events, writer, counts)
        return (
            StreamedReply(chunks, error_body, writer.framing()) if wanted.streams else WholeReply(chunks, fold_generate)
        )

    async def _choices(self, wanted: GeneratingRequest) -> WantedChoices:
        return wanted.choices(await self._service.breakers.tokens(wanted.breakers()), self._service.sampling)

    async def _prompt(self, wanted: GenerateRequest) -> tuple[int, ...]:
        if wanted.suffix:
            return await infill_prompt(self._service, Gap(wanted.prompt, wanted.suffix))
        return await text_prompt(self._service, wanted.prompt)

    async def _chat_prompt(self, wanted: GenerateRequest) -> ChatPrompt:
        """Behind the context of an earlier reply, if one is given. Raises InvalidRequest."""
        conversation, context = wanted.conversation(), tuple(wanted.context or ())
        check_vocabulary(context, self._service.vocab_size, "context", "Send the one of this model's reply.")
        with naming("context" if context else "prompt"):
            if context:
                return await self._service.next_turn(context, conversation)
            return await self._service.prompt(conversation)

    async def _capabilities(self) -> list[str]:
        abilities = await self._service.abilities()
        able = {
            "tools": abilities.tools,
            "insert": abilities.insertion,
            "thinking": abilities.thinking,
            "generic_tools": abilities.tool_support is ToolSupport.GENERIC,  # ours alone: tools are told as text
        }
        return ["completion", *(name for name, is_able in able.items() if is_able)]
