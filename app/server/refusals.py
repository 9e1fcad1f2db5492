"""Paths that the served model cannot answer, whatever they are asked: each says why, and what does.

Knows no dialect, but for the paths that its remedies name.
"""

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
    """What a model answers to whoever wants what it does not do."""

    summary: str
    message: str
    remedy: str

    def endpoints(self, bodies: Mapping[str, type[Struct]], errors: ErrorFormat | None = None) -> list[Endpoint]:
        """One for each path, with the body that requests to it have; `errors` as of an endpoint."""
        return [
            Endpoint("POST", path, self._refuse, self.summary, takes=body, errors=errors)
            for path, body in bodies.items()
        ]

    async def _refuse(self, request: Request) -> NoReturn:
        await read_body(request, _any_request)
        raise InvalidRequest(self.message, self.remedy, parameter="model")


class AnyRequest(Struct):
    """A request of which nothing is read."""


_any_request = msgspec.json.Decoder(AnyRequest)

NO_VECTORS = Refusal(
    "Refused: this model has no embeddings",
    "This server's model writes text, and has no embeddings",
    "Serve an embedding model: ingle serve --model FOLDER, of all-MiniLM-L6-v2 or BGE for one.",
)
RANKS_ONLY = Refusal(
    "Refused: this model ranks documents, and gives no vectors",
    "This server's model ranks documents, and gives no embeddings",
    "Use POST /v1/rerank, or serve an embedding model.",
)
NO_TEXT = Refusal(
    "Refused: this model writes no text",
    "This server's model gives embeddings, and writes no text",
    "Use POST /v1/embeddings or POST /v1/rerank, or serve a model that chats: ingle serve.",
)
