"""LM Studio's lists of models, and its requests to load, unload, or download one."""

import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal, NoReturn

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app.models.details import ModelDetails
from app.models.repository import RepositoryName
from app.server.dialects.lm_studio.errors import ERRORS
from app.server.dialects.lm_studio.fields import DOWNLOAD, LOAD, UNLOAD
from app.server.dialects.lm_studio.requests import DownloadRequest, LoadRequest, UnloadRequest
from app.server.http.endpoint import Endpoint
from app.server.http.errors import InvalidRequest
from app.server.http.reply import json_reply
from app.server.http.request_body import read_body
from app.server.served_model import ServedModel

Kind = Literal["llm", "embeddings"]

UNKNOWN = "unknown"
_BITS = re.compile(r"(?:^|\D)(\d{1,2})(?=_|$)")  # bits in the name of a quantization: Q4_K_M, F16


class Model(Struct, kw_only=True):
    """A name that requests may use, in the format of the older API."""

    id: str
    object: Literal["model"] = "model"
    type: Kind
    publisher: str
    arch: str
    compatibility_type: Literal["gguf", "safetensors"]
    quantization: str
    state: Literal["loaded"] = "loaded"
    max_context_length: int
    loaded_context_length: int
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
    load_time_seconds: float = 0.0  # the model was loaded before the request
    status: Literal["loaded"] = "loaded"
    load_config: LoadConfig | UnsetType = UNSET


class ModelEndpoints:
    """Endpoints that list the served model under each of its names."""

    def __init__(self, model: ServedModel, kind: Kind, capabilities: Callable[[], Awaitable[Sequence[str]]]) -> None:
        self._model = model
        self._kind = kind
        self._capabilities = capabilities

    def endpoints(self) -> list[Endpoint]:
        names, one, path = (
            "List the model names that requests may use",
            "Describe the model with a given name",
            "/api/v0/models/{model:path}",
        )
        posting = partial(Endpoint, "POST", errors=ERRORS)
        loaded, kept, fetched = (
            "Load the served model, which is already loaded",
            "Refused: the served model stays loaded",
            "Refused: see /api/pull",
        )
        v1 = "/api/v1/models"
        return [
            Endpoint("GET", "/api/v0/models", self.list_models, names, gives=ModelList),
            Endpoint("GET", path, self.retrieve_model, one, gives=Model),
            Endpoint("GET", v1, self.list_stored, names, gives=StoredModels),
            posting(f"{v1}/load", self.load, loaded, takes=LoadRequest, gives=Loaded),
            posting(f"{v1}/unload", self.unload, kept, takes=UnloadRequest),
            posting(f"{v1}/download", self.download, fetched, takes=DownloadRequest),
        ]

    async def list_models(self, request: Request) -> Response:
        details = await self._details_and_capabilities()
        return json_reply(ModelList([self._listed(name, *details) for name in self._model.names]))

    async def retrieve_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._model.check(name)
        return json_reply(self._listed(name, *await self._details_and_capabilities()))

    async def list_stored(self, request: Request) -> Response:
        details = await self._details_and_capabilities()
        return json_reply(StoredModels([self._stored(name, *details) for name in self._model.names]))

    async def load(self, request: Request) -> Response:
        body = await read_body(request, LOAD)
        loaded_context = self._model.context_length
        self._model.check(body.model)
        if body.context_length is not None and body.context_length > loaded_context:
            problem = f"context_length: the model has a context of {loaded_context} tokens, and is not reloaded"
            remedy = "Start the server with a larger --context."
            raise InvalidRequest(problem, remedy, parameter="context_length")
        config = LoadConfig(loaded_context) if body.echo_load_config else UNSET
        kind: Literal["llm", "embedding"] = "llm" if self._kind == "llm" else "embedding"
        return json_reply(Loaded(type=kind, instance_id=body.model, load_config=config))

    async def unload(self, request: Request) -> NoReturn:
        body = await read_body(request, UNLOAD)
        self._model.check(body.instance_id)
        problem = f"instance_id: {body.instance_id} is the served model, which cannot be unloaded"
        raise InvalidRequest(problem, "Stop the server: ingle stop.", parameter="instance_id", status=409)

    async def download(self, request: Request) -> NoReturn:
        await read_body(request, DOWNLOAD)
        remedy = "Use POST /api/pull, or ingle pull."
        raise InvalidRequest("model: this endpoint does not download models", remedy, parameter="model")

    async def _details_and_capabilities(self) -> tuple[ModelDetails, Sequence[str]]:
        """Return the details and capabilities of the model, which are the same under all its names."""
        return await self._model.details(), await self._capabilities()

    def _listed(self, name: str, details: ModelDetails, capabilities: Sequence[str]) -> Model:
        model = self._model
        return Model(
            id=name,
            type=self._kind,
            publisher=_publisher(model),
            arch=details.architecture or UNKNOWN,
            compatibility_type=details.format,
            quantization=details.quantization or UNKNOWN,
            max_context_length=_max_context_length(model, details),
            loaded_context_length=model.context_length,
            capabilities=list(capabilities),
        )

    def _stored(self, name: str, details: ModelDetails, capabilities: Sequence[str]) -> StoredModel:
        model = self._model
        is_llm, quantization = self._kind == "llm", details.quantization
        return StoredModel(
            type="llm" if is_llm else "embedding",
            publisher=_publisher(model),
            key=name,
            display_name=name.rpartition("/")[2],
            architecture=details.architecture,
            quantization=None if quantization is None else Quantization(quantization, _bits_per_weight(quantization)),
            size_bytes=details.size,
            params_string=_parameter_count_text(details.parameters),
            loaded_instances=[Instance(name, LoadConfig(model.context_length))],
            max_context_length=_max_context_length(model, details),
            format=details.format,
            capabilities=Abilities("tool_use" in capabilities) if is_llm else UNSET,
        )


def _publisher(model: ServedModel) -> str:
    repository = RepositoryName.parse(model.name)
    return str(repository).partition("/")[0] if repository else "inglenook"


def _max_context_length(model: ServedModel, details: ModelDetails) -> int:
    return max(model.context_length, details.context_length or 0)


def _bits_per_weight(quantization: str) -> int | None:
    found = _BITS.search(quantization)
    return None if found is None else int(found[1])


def _parameter_count_text(parameters: int) -> str | None:
    """Return the number in LM Studio's format: 135M, 8B."""
    if not parameters:
        return None
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"
