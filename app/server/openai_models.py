"""OpenAI's list of models, which here is one, and the check that a request means that one."""

import time
from typing import Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.server.errors import InvalidRequest


class Model(Struct):
    id: str
    created: int
    context_length: int
    object: Literal["model"] = "model"
    owned_by: str = "inglenook"


class ModelList(Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class ServedModel:
    """The one model of a server."""

    def __init__(self, name: str, context_length: int) -> None:
        self._name = name
        self._model = Model(name, int(time.time()), context_length)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.retrieve_model, methods=["GET"]),
        ]

    async def list_models(self, request: Request) -> Response:
        return _json(ModelList([self._model]))

    async def retrieve_model(self, request: Request) -> Response:
        self.check(request.path_params["model"])
        return _json(self._model)

    def check(self, name: str) -> None:
        """Raises InvalidRequest for the name of another model."""
        if name != self._name:
            message = f"The model {name!r} does not exist here"
            remedy = f"This server has {self._name!r}."
            raise InvalidRequest(message, remedy, parameter="model", code="model_not_found", status=404)


def _json(body: Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
