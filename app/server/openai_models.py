"""OpenAI's list of models, which here is one and its other names, and the check that a request means that one."""

import time
from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from app.server.endpoint import Endpoint
from app.server.errors import InvalidRequest

ANY = "*"  # as what an alias stands for: the model that is served, whichever that is


class ModelMeta(Struct):
    """What llama.cpp's server calls `meta`, as far as its clients read it."""

    n_ctx: int
    n_vocab: int


class Model(Struct):
    """A name that requests may give. Of the three ways to say how long a context may be, each has clients that know no
    other."""

    id: str
    created: int
    context_length: int  # tokens of a prompt and its reply together
    max_model_len: int
    meta: ModelMeta
    root: str  # the served model's own name
    object: Literal["model"] = "model"
    owned_by: str = "inglenook"


class ModelList(Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class ServedModel:
    """The one model of a server, under its name and those that stand for it."""

    def __init__(self, name: str, context_length: int, vocab_size: int, aliases: Mapping[str, str]) -> None:
        """`aliases` are other names and what each stands for: a model's name, or ANY. Those of other models are no
        names here."""
        created, meta = int(time.time()), ModelMeta(context_length, vocab_size)
        names = {name: None} | {alias: None for alias, meant in aliases.items() if meant in (name, ANY)}
        self._models = {
            known: Model(known, created, context_length, context_length, meta, root=name) for known in names
        }

    @property
    def names(self) -> list[str]:
        """That requests may give."""
        return list(self._models)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/v1/models", self.list_models, "The names that requests may give", gives=ModelList),
            Endpoint("GET", "/v1/models/{model:path}", self.retrieve_model, "What one name stands for", gives=Model),
        ]

    async def list_models(self, request: Request) -> Response:
        return _json(ModelList(list(self._models.values())))

    async def retrieve_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self.check(name)
        return _json(self._models[name])

    def check(self, name: str) -> None:
        """Raises InvalidRequest for the name of another model."""
        if name not in self._models:
            message = f"The model {name!r} does not exist here"
            remedy = f"This server has {', '.join(map(repr, self._models))}."
            raise InvalidRequest(message, remedy, parameter="model", code="model_not_found", status=404)


def _json(body: Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
