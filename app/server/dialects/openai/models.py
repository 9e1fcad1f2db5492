"""OpenAI's list of models, each under each of its names."""

import time
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app.models.residency.resident import Resident, State
from app.server.dialects.openai.reports import VERSION
from app.server.http.endpoint import Endpoint
from app.server.http.errors import client_message
from app.server.http.reply import json_reply
from app.server.served_models import LoadedModel, ModelDescription, ServedModels
from app.settings.settings import APP_NAME

MODELS = ("/v1/models", "/models")


class Version(Struct):
    """The reply of vLLM's path /version."""

    version: str


class ModelMeta(Struct):
    """The members of llama.cpp's `meta` that clients read."""

    n_ctx: int
    n_vocab: int
    n_params: int | None  # null: unknown


RouterState: TypeAlias = Literal["unloaded", "loading", "loaded"]


class ModelStatus(Struct):
    """The members of the `status` of llama.cpp's router that clients read."""

    value: RouterState
    failed: Literal[True] | UnsetType = UNSET  # set if the load failed, like the next two
    exit_code: Literal[1] | UnsetType = UNSET
    problem: str | UnsetType = UNSET  # why the load failed; an extension of this server


class Architecture(Struct):
    """The modalities of a model, as llama.cpp's router reports them."""

    input_modalities: tuple[Literal["text"]] = ("text",)
    output_modalities: tuple[Literal["text"]] = ("text",)


class Model(Struct):
    """A name that requests may use.

    The context length has several fields, because some clients read only one of them. Clients of Anthropic's API use
    the same path but other fields.
    """

    id: str
    created: int
    # the same time as `created`; this and the next three fields are for clients of Anthropic's API
    created_at: datetime
    display_name: str
    max_input_tokens: int
    context_length: int  # tokens of a prompt and its reply together
    max_model_len: int
    meta: ModelMeta
    root: str  # the model's own name
    default_sampling: dict[str, float] | None  # used by requests that set none; null: each API uses its own
    status: ModelStatus
    architecture: Architecture
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"
    owned_by: str = APP_NAME


class ModelList(Struct):
    data: list[Model]
    # this and the next two fields are for clients of Anthropic's API: they state that the list is complete
    first_id: str
    last_id: str
    has_more: Literal[False] = False
    object: Literal["list"] = "list"


class ModelEndpoints:
    """Endpoints that list each model under each of its names."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._created = int(time.time())

    def endpoints(self) -> list[Endpoint]:
        all_names, one = "List the model names that requests may use", "Describe the model with a given name"
        return [
            *(Endpoint("GET", path, self.list_models, all_names, gives=ModelList) for path in MODELS),
            *(Endpoint("GET", f"{path}/{{model:path}}", self.retrieve_model, one, gives=Model) for path in MODELS),
            Endpoint("GET", "/version", self.version, "Return the version of this program", gives=Version),
        ]

    async def version(self, request: Request) -> Response:
        return json_reply(Version(VERSION))

    async def list_models(self, request: Request) -> Response:
        models = await self._models.descriptions()
        listed = [self._model(model, name) for model in models for name in model.names]
        return json_reply(ModelList(listed, listed[0].id, listed[-1].id))

    async def retrieve_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        model = await self._models.describe(name)
        return json_reply(self._model(model, model.name if name == model.key else name))

    def _model(self, model: ModelDescription, name: str) -> Model:
        length, recommended = model.context_length, model.sampling.recommended
        return Model(
            name,
            self._created,
            datetime.fromtimestamp(self._created, UTC),
            name,
            length,
            length,
            length,
            ModelMeta(length, model.vocab_size, model.details.parameters or None),
            model.name,
            None if recommended is None else dict(recommended),
            _status(model.resident),
            Architecture(),
        )


def _status(resident: Resident[LoadedModel]) -> ModelStatus:
    if resident.problem is None:
        return ModelStatus(router_state(resident))
    return ModelStatus(router_state(resident), failed=True, exit_code=1, problem=client_message(resident.problem))


def router_state(resident: Resident[LoadedModel]) -> RouterState:
    """Return the state of a model by llama.cpp's name."""
    match resident.state:
        case State.LOADED:
            return "loaded"
        case State.WAITING | State.LOADING:
            return "loading"
    return "unloaded"
