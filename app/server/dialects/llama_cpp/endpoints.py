"""The endpoints of llama.cpp's server that generate text: from a request to the response that carries its reply."""

from functools import partial

import msgspec
from starlette.requests import Request

from app.chat.service import ChatService
from app.server.continuation import Continuation, continuation_events, fitting_infill, mixed_prompt
from app.server.dialects.llama_cpp.errors import ERRORS, error_body
from app.server.dialects.llama_cpp.replies import Completion, Writer, fold
from app.server.dialects.llama_cpp.requests import CompletionRequest, GeneratingRequest, InfillRequest
from app.server.dialects.llama_cpp.tokens import TokenEndpoints
from app.server.door import of_caller
from app.server.endpoint import Endpoint
from app.server.framing import BARE_EVENTS
from app.server.reply import StreamedReply, WholeReply
from app.server.request_body import read_body
from app.server.served_model import ServedModel
from app.server.token_counts import TokenCounts

COMPLETIONS = ("/completion", "/completions")


class LlamaCppEndpoints:
    """Serves one model."""

    def __init__(self, service: ChatService, model: ServedModel) -> None:
        self._service = service
        self._model = model
        self._completion_decoder = msgspec.json.Decoder(CompletionRequest)
        self._infill_decoder = msgspec.json.Decoder(InfillRequest)

    def endpoints(self) -> list[Endpoint]:
        generating = partial(Endpoint, gives=Completion, streams=Completion, framing=BARE_EVENTS, errors=ERRORS)
        goes_on, missing = "What a text goes on with", "What is missing between two texts"
        return [
            *(generating("POST", path, self.complete, goes_on, takes=CompletionRequest) for path in COMPLETIONS),
            generating("POST", "/infill", self.infill, missing, takes=InfillRequest),
            *TokenEndpoints(self._service, self._model).endpoints(),
        ]

    async def complete(self, request: Request) -> StreamedReply[Completion] | WholeReply[Completion]:
        wanted = await read_body(request, self._completion_decoder)
        self._check(wanted)
        return await self._reply(request, wanted, await mixed_prompt(self._service, wanted.prompt))

    async def infill(self, request: Request) -> StreamedReply[Completion] | WholeReply[Completion]:
        wanted = await read_body(request, self._infill_decoder)
        self._check(wanted)
        room = max(1, wanted.n_predict or 1)
        prompt, left_out = await fitting_infill(self._service, wanted.gap(), room, "input_prefix")
        return await self._reply(request, wanted, prompt, truncated=left_out > 0)

    def _check(self, wanted: GeneratingRequest) -> None:
        if wanted.model:
            self._model.check(wanted.model)
        wanted.check()

    async def _reply(
        self, request: Request, wanted: GeneratingRequest, prompt: tuple[int, ...], *, truncated: bool = False
    ) -> StreamedReply[Completion] | WholeReply[Completion]:
        service, counts = self._service, TokenCounts()
        choices = wanted.choices(await service.breakers.tokens(wanted.breakers()), service.sampling)
        origin = of_caller(request, wanted.origin(request.headers))
        continuation = Continuation([prompt], choices, wanted.asked_grammar())
        writer = Writer(service, choices.candidates[0], truncated=truncated)
        chunks = writer.chunks(continuation_events(service, continuation, origin, counts), counts)
        if wanted.stream:
            return StreamedReply(chunks, error_body, BARE_EVENTS, counts)
        return WholeReply(chunks, fold)
