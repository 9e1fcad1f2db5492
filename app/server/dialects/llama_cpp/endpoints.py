"""Endpoints of llama.cpp's server: completion and infill, with prompts of all formats."""

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request

from app.generation.events import TokenCounts
from app.generation.service import ChatService
from app.server.dialects.llama_cpp.biases import token_biases
from app.server.dialects.llama_cpp.errors import ERRORS, error_body
from app.server.dialects.llama_cpp.fields import COMPLETION, INFILL
from app.server.dialects.llama_cpp.prompts import OnePrompt
from app.server.dialects.llama_cpp.properties import PropertyEndpoints
from app.server.dialects.llama_cpp.replies import ChunkWriter, Completion, ReportOptions, fold, framing
from app.server.dialects.llama_cpp.requests import CompletionRequest, GeneratingRequest, InfillRequest
from app.server.dialects.llama_cpp.router import RouterEndpoints
from app.server.dialects.llama_cpp.settings import GenerationSettings
from app.server.dialects.llama_cpp.tokens import TokenEndpoints
from app.server.http.endpoint import BARE_EVENTS, Endpoint
from app.server.http.errors import convert_errors
from app.server.http.reply import StreamedReply, WholeReply
from app.server.http.request_body import read_body
from app.server.origin import origin_of
from app.server.served_models import Served, ServedModels
from app.server.text_prompts import infill_prompt_that_fits, text_prompt


async def encode_prompt(service: ChatService, prompt: OnePrompt, field: str) -> tuple[int, ...]:
    """Encode a prompt. A BOS token is added if the prompt starts with text.

    Raises InvalidRequest for a prompt that is empty, too long, or not in the vocabulary.
    """
    if isinstance(prompt, str):
        return await text_prompt(service, prompt, field)
    first, *rest = prompt
    with convert_errors(field):
        first_ids = (first,) if isinstance(first, int) else await service.encode_text(first)
    return await text_prompt(service, (*first_ids, *await service.encode_mixed(rest)), field)


COMPLETIONS = ("/completion", "/completions")


class LlamaCppEndpoints:
    """Endpoints that continue text, and those about tokens, properties, and models."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def endpoints(self) -> list[Endpoint]:
        generating = partial(
            Endpoint, gives=Completion | list[Completion], streams=Completion, framing=BARE_EVENTS, errors=ERRORS
        )
        completing = partial(generating, takes=CompletionRequest)
        goes_on, missing = "Continue text", "Fill in the text between a prefix and a suffix"
        return [
            *(completing("POST", path, self.complete, goes_on) for path in COMPLETIONS),
            generating("POST", "/infill", self.infill, missing, takes=InfillRequest),
            *TokenEndpoints(self._models).endpoints(),
            *PropertyEndpoints(self._models).endpoints(),
            *RouterEndpoints(self._models).endpoints(),
        ]

    async def complete(self, request: Request) -> StreamedReply[Completion] | WholeReply[Completion]:
        body = await read_body(request, COMPLETION)
        served = await self._served(request, body)
        prompts = [await encode_prompt(served.service, prompt, path) for path, prompt in body.prompts().items()]
        return await _reply(request, served, body, prompts)

    async def infill(self, request: Request) -> StreamedReply[Completion] | WholeReply[Completion]:
        body = await read_body(request, INFILL)
        served = await self._served(request, body)
        reply_tokens = max(1, body.n_predict or 1)
        prompt, left_out = await infill_prompt_that_fits(served.service, body.gap(), reply_tokens, "input_prefix")
        return await _reply(request, served, body, [prompt], truncated=left_out > 0)

    async def _served(self, request: Request, body: GeneratingRequest) -> Served[ChatService]:
        body.check()
        return await self._models.chat(request, body.model, body.origin_fields(), streams=bool(body.stream))


async def _reply(
    request: Request,
    served: Served[ChatService],
    body: GeneratingRequest,
    prompts: Sequence[tuple[int, ...]],
    *,
    truncated: bool = False,
) -> StreamedReply[Completion] | WholeReply[Completion]:
    service = served.service
    biases = await token_biases(service, body.logit_bias)
    options = body.generation_options(service.sampling, biases)
    origin = origin_of(request, body.origin_fields())
    settings = [GenerationSettings.of(one, service.context_length, body.echoed_fields) for one in options.candidates]
    reports = ReportOptions(
        served.name,
        prompts,
        settings,
        truncated=truncated,
        progress=bool(body.return_progress),
        timings=bool(body.timings_per_token),
    )
    counts = TokenCounts()
    chunks = ChunkWriter(service, reports).chunks(service.reply(prompts, options, origin, counts))
    fields = body.response_fields or ()
    if body.stream:
        return StreamedReply(chunks, error_body, framing(fields), counts)
    return WholeReply(chunks, fold(reports_tokens=bool(body.return_tokens), fields=fields))
