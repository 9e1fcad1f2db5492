"""Ollama's endpoints about models."""

import hashlib
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app.generation.generic_tools import ToolSupport
from app.models.details import ModelDetails
from app.models.residency.ledger import HOST
from app.server.dialects.ollama.errors import ERRORS
from app.server.dialects.ollama.fields import SHOW
from app.server.dialects.ollama.requests import ShowRequest
from app.server.http.endpoint import Endpoint
from app.server.http.reply import json_reply
from app.server.http.request_body import read_body
from app.server.served_models import ModelDescription, ServedModels

VERSION = "0.14.0"  # version of Ollama's API
NEVER = "9999-12-31T23:59:59Z"
UNKNOWN = "unknown"
# name of a sampling parameter -> Ollama's name, if it differs
_PARAMETER_NAMES = {"repetition_penalty": "repeat_penalty"}
# Some clients search the template for this text to find out whether a model supports infilling.
_INSERTS = "{# .Suffix #}"


class Details(Struct, kw_only=True):
    parent_model: str = ""
    format: str  # gguf or safetensors
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int  # bytes
    digest: str
    details: Details


class ModelList(Struct):
    models: list[ListedModel]


class RunningModel(Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(Struct):
    models: list[RunningModel]


class ShownModel(Struct, kw_only=True):
    """The reply to /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    license: str | UnsetType = UNSET


class Version(Struct):
    version: str


class ModelEndpoints:
    """Endpoints about models."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._created = datetime.now(UTC).isoformat()  # reported for a model whose files tell no time

    def endpoints(self) -> list[Endpoint]:
        endpoint = partial(Endpoint, errors=ERRORS)
        shown = "Describe a model and its capabilities"
        return [
            endpoint("GET", "/api/version", self.version, "Return the version of Ollama's API", gives=Version),
            endpoint("GET", "/api/tags", self.list_models, "List the models", gives=ModelList),
            endpoint("GET", "/api/ps", self.list_running, "List the loaded models", gives=RunningModels),
            endpoint("POST", "/api/show", self.show, shown, takes=ShowRequest, gives=ShownModel),
        ]

    async def version(self, request: Request) -> Response:
        return json_reply(Version(VERSION))

    async def list_models(self, request: Request) -> Response:
        models = [
            ListedModel(
                name=name,
                model=name,
                modified_at=self._modified_at(model),
                size=model.details.size,
                digest=_digest(model),
                details=_details(model.details),
            )
            for model in await self._models.descriptions()
            for name in model.names
        ]
        return json_reply(ModelList(models))

    async def list_running(self, request: Request) -> Response:
        models = [
            RunningModel(
                name=name,
                model=name,
                size=_size(model),
                digest=_digest(model),
                details=_details(model.details),
                expires_at=self._expires_at(model),
                size_vram=_gpu_size(model),
                context_length=model.context_length,
            )
            for model in await self._models.descriptions()
            if model.is_loaded
            for name in model.names
        ]
        return json_reply(RunningModels(models))

    async def show(self, request: Request) -> Response:
        body = await read_body(request, SHOW)
        model = await self._models.describe(body.required_name())
        details, capabilities = model.details, capability_names(model)
        architecture = details.architecture or UNKNOWN
        shown = ShownModel(
            modelfile=f"FROM {model.name}",
            parameters=_parameters(model),
            template=model.chat_template + (_INSERTS if "insert" in capabilities else ""),
            details=_details(details),
            model_info={
                "general.architecture": architecture,
                "general.basename": model.name.rpartition("/")[2],
                "general.parameter_count": details.parameters,
                f"{architecture}.context_length": model.context_length,
                f"{architecture}.vocab_size": model.vocab_size,
            },
            capabilities=capabilities,
            modified_at=self._modified_at(model),
            license=details.license or UNSET,
        )
        return json_reply(shown)

    def _modified_at(self, model: ModelDescription) -> str:
        return model.details.stored_at or self._created

    def _expires_at(self, model: ModelDescription) -> str:
        seconds = self._models.seconds_left(model)
        return NEVER if seconds is None else (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def capability_names(model: ModelDescription) -> list[str]:
    """Return the abilities of a model by Ollama's names."""
    if model.kind == "embedding":
        return ["embedding"]
    capabilities = model.capabilities
    abilities_by_name = {
        "tools": capabilities.tools,
        "insert": capabilities.insertion,
        "thinking": capabilities.thinking,
        # an extension of this server: tools are described in the prompt
        "generic_tools": capabilities.tool_support is ToolSupport.GENERIC,
    }
    return ["completion", *(name for name, is_able in abilities_by_name.items() if is_able)]


def _parameters(model: ModelDescription) -> str:
    """Return Ollama's parameters, one per line."""
    recommended = model.sampling.recommended or {}
    lines = (f"{_PARAMETER_NAMES.get(name, name)} {value:.7g}" for name, value in recommended.items())
    return "\n".join((f"num_ctx {model.context_length}", *lines))


def _size(model: ModelDescription) -> int:
    """Return the bytes that a loaded model may use; if they are unknown, the size of its files."""
    return sum(it.total for it in model.memory.values()) or model.details.size


def _gpu_size(model: ModelDescription) -> int:
    return sum(it.total for memory, it in model.memory.items() if memory != HOST)


def _details(details: ModelDetails) -> Details:
    family = details.architecture or UNKNOWN
    return Details(
        format=details.format,
        family=family,
        families=[family],
        parameter_size=_parameter_count_text(details.parameters),
        quantization_level=details.quantization or UNKNOWN,
    )


def _parameter_count_text(parameters: int) -> str:
    """Return the number in Ollama's format: 134.52M, 8.03B."""
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def _digest(model: ModelDescription) -> str:
    """Return the digest by which clients tell models apart: that of the file, if known, or else of the name."""
    return model.details.sha256 or hashlib.sha256(model.details.name.encode()).hexdigest()
