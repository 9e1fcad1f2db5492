"""LM Studio's list of models, by which editors find out what a server has loaded, and how long its context is."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from app.chat.service import ChatService
from app.models.repository import RepositoryName
from app.server.endpoint import Endpoint
from app.server.reply import json_reply
from app.server.served_model import ServedModel

Kind = Literal["llm", "embeddings"]


class Model(Struct, kw_only=True):
    """A name that requests may give."""

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


class LMStudioEndpoints:
    """Lists the one model of a server, once for each of its names."""

    def __init__(self, model: ServedModel, kind: Kind, capabilities: Callable[[], Awaitable[Sequence[str]]]) -> None:
        self._model = model
        self._kind = kind
        self._capabilities = capabilities

    def endpoints(self) -> list[Endpoint]:
        one, path = "What one name stands for", "/api/v0/models/{model:path}"
        return [
            Endpoint("GET", "/api/v0/models", self.list_models, "The names that requests may give", gives=ModelList),
            Endpoint("GET", path, self.retrieve_model, one, gives=Model),
        ]

    async def list_models(self, request: Request) -> Response:
        return json_reply(ModelList([await self._listed(name) for name in self._model.names]))

    async def retrieve_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._model.check(name)
        return json_reply(await self._listed(name))

    async def _listed(self, name: str) -> Model:
        model, told = self._model, await self._model.details()
        repository = RepositoryName.parse(model.loaded_as)
        return Model(
            id=name,
            type=self._kind,
            publisher=str(repository).partition("/")[0] if repository else "inglenook",
            arch=told.architecture or "unknown",
            compatibility_type=told.format,
            quantization=told.quantization or "unknown",
            max_context_length=max(model.context_length, told.context_length or 0),
            loaded_context_length=model.context_length,
            capabilities=list(await self._capabilities()),
        )


def of_writing(service: ChatService, model: ServedModel) -> list[Endpoint]:
    """Of a model that writes text."""

    async def capabilities() -> list[str]:
        return ["tool_use"] if (await service.abilities()).tools else []

    return LMStudioEndpoints(model, "llm", capabilities).endpoints()


def of_embedding(model: ServedModel) -> list[Endpoint]:
    """Of a model that gives vectors."""

    async def capabilities() -> list[str]:
        return []

    return LMStudioEndpoints(model, "embeddings", capabilities).endpoints()
