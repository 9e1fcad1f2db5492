"""Properties of the server and its slots, as llama.cpp's server reports them.

A slot runs one request. All slots share one KV cache.
"""

from functools import partial
from typing import Literal, NoReturn

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from app.generation.service import ChatService
from app.server.dialects.llama_cpp.errors import ERRORS
from app.server.dialects.llama_cpp.requests import CompletionRequest
from app.server.dialects.llama_cpp.sampling import ANY_SEED
from app.server.dialects.llama_cpp.settings import GenerationSettings
from app.server.http.endpoint import Endpoint
from app.server.http.errors import InvalidRequest
from app.server.http.reply import json_reply
from app.server.refusals import NO_TEXT
from app.server.served_models import ModelDescription, ServedModels


class Modalities(Struct):
    vision: bool = False
    audio: bool = False


class DefaultSettings(Struct):
    n_ctx: int
    params: GenerationSettings  # settings of a request that sets none


class TemplateCaps(Struct):
    """The abilities of a chat template."""

    supports_tools: bool
    supports_tool_calls: bool


class Properties(Struct, kw_only=True):
    """The properties of a model; without its name in the query, those of the default model and of the server."""

    role: Literal["router", "model"]
    default_generation_settings: DefaultSettings
    total_slots: int  # requests that can run at the same time; 0: the model is not loaded
    model_alias: str
    model_path: str  # the model's name, because the path is private
    chat_template: str
    chat_template_caps: TemplateCaps
    bos_token: str
    eos_token: str
    modalities: Modalities
    build_info: str
    # an extension of this server; generic: tools are described in the prompt
    tool_support: Literal["native", "generic", "none"]
    is_sleeping: bool  # whether the model is not loaded; a request loads it
    models_autoload: Literal[True] = True


class NextToken(Struct):
    n_decoded: int  # tokens of the reply so far
    n_remain: int  # tokens that may follow; -1: the rest of the context


class Slot(Struct, kw_only=True):
    id: int
    id_task: int  # -1: no task
    n_ctx: int
    speculative: bool = False
    is_processing: bool
    next_token: NextToken


class PropertyEndpoints:
    """Endpoints about the server, and about the slots of one of its models."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def endpoints(self) -> list[Endpoint]:
        endpoint = partial(Endpoint, errors=ERRORS)
        listed, kept = "List the running requests by slot", "Refused: all slots share one cache"
        return [
            endpoint("GET", "/props", self.properties, "Return the properties of the server", gives=Properties),
            endpoint("GET", "/slots", self.slots, listed, gives=list[Slot]),
            endpoint("POST", "/slots/{id}", self.refuse_slot_action, kept),
        ]

    async def properties(self, request: Request) -> Response:
        """Report the properties of a model without loading it."""
        model = await self._described(request)
        service = model.service if isinstance(model.service, ChatService) else None
        special = {} if service is None else service.tokenizer.special_tokens
        tools = model.capabilities.tools
        properties = Properties(
            role="model" if request.query_params.get("model") else "router",
            default_generation_settings=DefaultSettings(model.context_length, _default_settings(model)),
            total_slots=0 if service is None else service.streams.max_running,
            model_alias=model.name,
            model_path=model.name,
            chat_template=model.chat_template,
            chat_template_caps=TemplateCaps(tools, tools),
            bos_token=special.get("bos_token", ""),
            eos_token=special.get("eos_token", ""),
            modalities=Modalities(),
            build_info="inglenook",
            tool_support=model.capabilities.tool_support.value,
            is_sleeping=not model.is_loaded,
        )
        return json_reply(properties)

    async def _described(self, request: Request) -> ModelDescription:
        """Return the model in the query, or the default model. Raises InvalidRequest if it generates no text."""
        model = await self._models.describe(request.query_params.get("model"))
        if model.kind != "chat":
            raise NO_TEXT.error()
        return model

    async def slots(self, request: Request) -> Response:
        """Return a slot for each running request, and the free slots. A model that is not loaded has none."""
        service = (await self._described(request)).service
        if not isinstance(service, ChatService):
            return json_reply([])
        streams, context = service.streams, service.context_length
        running = [it for it in streams.requests() if it.has_slot]
        free = max(0, streams.max_running - len(running))
        if not free and request.query_params.get("fail_on_no_slot"):
            raise InvalidRequest("No slot is free", "Try again later.", status=503)
        slots = [
            Slot(
                id=index,
                id_task=it.id,
                n_ctx=context,
                is_processing=True,
                next_token=NextToken(len(it.output_ids), _tokens_left(it.params.max_tokens, len(it.output_ids))),
            )
            for index, it in enumerate(running)
        ]
        idle = partial(Slot, id_task=-1, n_ctx=context, is_processing=False, next_token=NextToken(0, -1))
        slots += [idle(id=len(running) + index) for index in range(free)]
        return json_reply(slots)

    async def refuse_slot_action(self, request: Request) -> NoReturn:
        raise InvalidRequest(
            "Slots cannot be saved, restored, or erased: all requests share one cache",
            "Do not send this request; the server keeps its cache on disk by itself.",
            status=501,
        )


def _default_settings(model: ModelDescription) -> GenerationSettings:
    default_request = CompletionRequest(prompt="")
    options = default_request.generation_options(model.sampling)
    settings = GenerationSettings.of(options.candidates[0], model.context_length, default_request.echoed_fields)
    settings.seed = ANY_SEED
    return settings


def _tokens_left(limit: int | None, num_tokens: int) -> int:
    return -1 if limit is None else max(0, limit - num_tokens)
