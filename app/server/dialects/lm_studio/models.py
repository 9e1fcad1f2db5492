"""LM Studio's lists of models, and its requests to load, unload, or download one."""

import re
import time
from functools import partial
from typing import Literal, NoReturn

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app.models.repository import RepositoryName
from app.server.dialects.lm_studio.errors import ERRORS
from app.server.dialects.lm_studio.fields import DOWNLOAD, LOAD, UNLOAD
from app.server.dialects.lm_studio.requests import DownloadRequest, LoadRequest, UnloadRequest
from app.server.http.endpoint import Endpoint
from app.server.http.errors import InvalidRequest
from app.server.http.reply import json_reply
from app.server.http.request_body import read_body
from app.server.served_models import ModelDescription, ServedModels

UNKNOWN = "unknown"
_BITS = re.compile(r"(?:^|\D)(\d{1,2})(?=_|$)")  # bits in the name of a quantization: Q4_K_M, F16


class Model(Struct, kw_only=True):
    """A name that requests may use, in the format of the older API."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["llm", "embeddings"]
    publisher: str
    arch: str
    compatibility_type: Literal["gguf", "safetensors"]
    quantization: str
    state: Literal["loaded", "not-loaded"]
    max_context_length: int
    loaded_context_length: int | UnsetType = UNSET
    capabilities: list[str]


class ModelList(Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class LoadConfig(Struct):
    context_length: int


class Instance(Struct):
    id: str
    config: LoadConfig


class Quantization(Struct):
    name: str
    bits_per_weight: int | None


class Abilities(Struct):
    trained_for_tool_use: bool
    vision: bool = False


class StoredModel(Struct, kw_only=True):
    """A name that requests may use, in the format of the newer API."""

    type: Literal["llm", "embedding"]
    publisher: str
    key: str
    display_name: str
    architecture: str | None
    quantization: Quantization | None
    size_bytes: int
    params_string: str | None
    loaded_instances: list[Instance]
    max_context_length: int
    format: Literal["gguf", "safetensors"]
    capabilities: Abilities | UnsetType = UNSET  # set for models that generate text
    description: None = None


class StoredModels(Struct):
    models: list[StoredModel]


class Loaded(Struct, kw_only=True):
    type: Literal["llm", "embedding"]
    instance_id: str
    load_time_seconds: float
    status: Literal["loaded"] = "loaded"
    load_config: LoadConfig | UnsetType = UNSET


class Unloaded(Struct):
    instance_id: str


class ModelEndpoints:
    """Endpoints that list, load, and unload models."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def endpoints(self) -> list[Endpoint]:
        names, one, path = (
            "List the model names that requests may use",
            "Describe the model with a given name",
            "/api/v0/models/{model:path}",
        )
        posting = partial(Endpoint, "POST", errors=ERRORS)
        loaded, freed, fetched = "Load a model", "Unload a model", "Refused: see /api/pull"
        v1 = "/api/v1/models"
        return [
            Endpoint("GET", "/api/v0/models", self.list_models, names, gives=ModelList),
            Endpoint("GET", path, self.retrieve_model, one, gives=Model),
            Endpoint("GET", v1, self.list_stored, names, gives=StoredModels),
            posting(f"{v1}/load", self.load, loaded, takes=LoadRequest, gives=Loaded),
            posting(f"{v1}/unload", self.unload, freed, takes=UnloadRequest, gives=Unloaded),
            posting(f"{v1}/download", self.download, fetched, takes=DownloadRequest),
        ]

    async def list_models(self, request: Request) -> Response:
        models = await self._models.descriptions()
        return json_reply(ModelList([_listed(model, name) for model in models for name in model.names]))

    async def retrieve_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        return json_reply(_listed(await self._models.describe(name), name))

    async def list_stored(self, request: Request) -> Response:
        models = await self._models.descriptions()
        return json_reply(StoredModels([_stored(model, name) for model in models for name in model.names]))

    async def load(self, request: Request) -> Response:
        body = await read_body(request, LOAD)
        started = time.monotonic()
        await self._models.load(body.model, keep_alive=body.ttl)
        seconds, model = time.monotonic() - started, await self._models.describe(body.model)
        if body.context_length is not None and body.context_length > model.context_length:
            problem = f"context_length: the model has a context of {model.context_length} tokens, and is not reloaded"
            remedy = "Start the server with a larger --context."
            raise InvalidRequest(problem, remedy, parameter="context_length")
        config = LoadConfig(model.context_length) if body.echo_load_config else UNSET
        return json_reply(
            Loaded(type=_type(model), instance_id=body.model, load_time_seconds=round(seconds, 3), load_config=config)
        )

    async def unload(self, request: Request) -> Response:
        body = await read_body(request, UNLOAD)
        await self._models.unload(body.instance_id)
        return json_reply(Unloaded(body.instance_id))

    async def download(self, request: Request) -> NoReturn:
        await read_body(request, DOWNLOAD)
        remedy = "Use POST /api/pull, or ingle pull."
        raise InvalidRequest("model: this endpoint does not download models", remedy, parameter="model")


def _listed(model: ModelDescription, name: str) -> Model:
    details = model.details
    return Model(
        id=name,
        type="llm" if model.kind == "chat" else "embeddings",
        publisher=_publisher(model),
        arch=details.architecture or UNKNOWN,
        compatibility_type=details.format,
        quantization=details.quantization or UNKNOWN,
        state="loaded" if model.is_loaded else "not-loaded",
        max_context_length=_max_context_length(model),
        loaded_context_length=model.context_length if model.is_loaded else UNSET,
        capabilities=["tool_use"] if model.kind == "chat" and model.capabilities.tools else [],
    )


def _stored(model: ModelDescription, name: str) -> StoredModel:
    details, quantization = model.details, model.details.quantization
    instances = [Instance(name, LoadConfig(model.context_length))] if model.is_loaded else []
    return StoredModel(
        type=_type(model),
        publisher=_publisher(model),
        key=name,
        display_name=name.rpartition("/")[2],
        architecture=details.architecture,
        quantization=None if quantization is None else Quantization(quantization, _bits_per_weight(quantization)),
        size_bytes=details.size,
        params_string=_parameter_count_text(details.parameters),
        loaded_instances=instances,
        max_context_length=_max_context_length(model),
        format=details.format,
        capabilities=Abilities(model.capabilities.tools) if model.kind == "chat" else UNSET,
    )


def _type(model: ModelDescription) -> Literal["llm", "embedding"]:
    return "llm" if model.kind == "chat" else "embedding"


def _publisher(model: ModelDescription) -> str:
    repository = RepositoryName.parse(model.name)
    return str(repository).partition("/")[0] if repository else "inglenook"


def _max_context_length(model: ModelDescription) -> int:
    return max(model.context_length, model.details.context_length or 0)


def _bits_per_weight(quantization: str) -> int | None:
    found = _BITS.search(quantization)
    return None if found is None else int(found[1])


def _parameter_count_text(parameters: int) -> str | None:
    """Return the number in LM Studio's format: 135M, 8B."""
    if not parameters:
        return None
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"
