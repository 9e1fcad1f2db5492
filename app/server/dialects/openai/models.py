"""OpenAI's list of models, which here is one and its other names."""

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
    """As vLLM reports it."""

    version: str


class ModelMeta(Struct):
    """What llama.cpp's server calls `meta`, as far as its clients read it."""

    n_ctx: int
    n_vocab: int


class Model(Struct):
    """A name that requests may give. Of the ways to say how long a context may be, each has clients that know no other;
    and clients of Anthropic's API, which ask on the same path, know some of the fields by other names."""

    id: str
    created: int
    created_at: datetime  # the same, as the next three for clients of Anthropic's API
    display_name: str
    max_input_tokens: int
    context_length: int  # tokens of a prompt and its reply together
    max_model_len: int
    meta: ModelMeta
    root: str  # the served model's own name
    default_sampling: dict[str, float] | None  # of requests that leave it open; null: each API has its own
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"
    owned_by: str = APP_NAME


class ModelList(Struct):
    data: list[Model]
    first_id: str  # all are there: this one, and the next two say so to clients of Anthropic's API
    last_id: str
    has_more: Literal[False] = False
    object: Literal["list"] = "list"


class ModelEndpoints:
    """Lists the one model of a server, once for each of its names."""

    def __init__(self, served: ServedModel, sampling: DefaultSampling = API_DEFAULTS) -> None:
        self._served = served
        self._sampling = sampling

    def endpoints(self) -> list[Endpoint]:
        all_names, one = "The names that requests may give", "What one name stands for"
        return [
            *(Endpoint("GET", path, self.list_models, all_names, gives=ModelList) for path in MODELS),
            *(Endpoint("GET", f"{path}/{{model:path}}", self.retrieve_model, one, gives=Model) for path in MODELS),
            Endpoint("GET", "/version", self.version, "The version of this program", gives=Version),
        ]

    async def version(self, request: Request) -> Response:
        return json_reply(Version(VERSION))

    async def list_models(self, request: Request) -> Response:
        names = self._served.names
        return json_reply(ModelList([self._model(name) for name in names], names[0], names[-1]))

    async def retrieve_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        return json_reply(self._model(self._served.reply_name(name)))

    def _model(self, name: str) -> Model:
        served = self._served
        length, created = served.context_length, datetime.fromtimestamp(served.created, UTC)
        meta = ModelMeta(length, served.vocab_size)
        return Model(
            name, served.created, created, name, length, length, length, meta, served.name, self._recommended_sampling
        )

    @property
    def _recommended_sampling(self) -> dict[str, float] | None:
        recommended = self._sampling.recommended
        return None if recommended is None else dict(recommended)
