"""OpenAI's list of models: the served model under each of its names."""

from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from app.generation.options import API_DEFAULTS, DefaultSampling
from app.server.dialects.openai.reports import VERSION
from app.server.http.endpoint import Endpoint
from app.server.http.reply import json_reply
from app.server.served_model import ServedModel
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
    root: str  # the served model's own name
    default_sampling: dict[str, float] | None  # used by requests that set none; null: each API uses its own
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
    """Endpoints that list the served model under each of its names."""

    def __init__(self, served: ServedModel, sampling: DefaultSampling = API_DEFAULTS) -> None:
        self._served = served
        self._sampling = sampling

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
        names, parameters = self._served.names, await self._served.parameters()
        return json_reply(ModelList([self._model(name, parameters) for name in names], names[0], names[-1]))

    async def retrieve_model(self, request: Request) -> Response:
        name = self._served.reply_name(request.path_params["model"])
        return json_reply(self._model(name, await self._served.parameters()))

    def _model(self, name: str, parameters: int | None) -> Model:
        served = self._served
        length, created = served.context_length, datetime.fromtimestamp(served.created, UTC)
        meta = ModelMeta(length, served.vocab_size, parameters)
        return Model(
            name, served.created, created, name, length, length, length, meta, served.name, self._recommended_sampling
        )

    @property
    def _recommended_sampling(self) -> dict[str, float] | None:
        recommended = self._sampling.recommended
        return None if recommended is None else dict(recommended)
