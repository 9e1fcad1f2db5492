"""Errors for requests that a model cannot answer. They say why, and which model or path can."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import msgspec
from msgspec import Struct
from starlette.requests import Request

from app.server.http.endpoint import Endpoint, ErrorFormat
from app.server.http.errors import InvalidRequest
from app.server.http.request_body import read_body


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error for all requests that a model does not support."""

    summary: str
    message: str
    remedy: str

    def endpoints(self, bodies: Mapping[str, type[Struct]], errors: ErrorFormat | None = None) -> list[Endpoint]:
        """Return an endpoint for each path in `bodies`, with the type of its request body. `errors` is the error
        format.
        """
        return [
            Endpoint("POST", path, self._refuse, self.summary, takes=body, errors=errors)
            for path, body in bodies.items()
        ]

    def error(self) -> InvalidRequest:
        return InvalidRequest(self.message, self.remedy, parameter="model")

    async def _refuse(self, request: Request) -> NoReturn:
        await read_body(request, _any_request)
        raise self.error()


class AnyRequest(Struct):
    """A request whose fields are not read."""


_any_request = msgspec.json.Decoder(AnyRequest)

NO_VECTORS = Refusal(
    "Refused: this model returns no embeddings",
    "This model generates text, and returns no embeddings",
    "Name an embedding model, such as all-MiniLM-L6-v2.",
)
RANKS_ONLY = Refusal(
    "Refused: this model ranks documents, and returns no embeddings",
    "This model ranks documents, and returns no embeddings",
    "Use POST /v1/rerank, or name an embedding model.",
)
NO_TEXT = Refusal(
    "Refused: this model generates no text",
    "This model returns embeddings, and generates no text",
    "Use POST /v1/embeddings or POST /v1/rerank, or name a chat model.",
)
