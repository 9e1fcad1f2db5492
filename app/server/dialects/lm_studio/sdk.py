"""What LM Studio's own SDKs ask for. They speak a protocol over WebSocket that is not documented, and are told so."""

from typing import NoReturn

from starlette.requests import Request

from app.server.endpoint import Endpoint
from app.server.errors import InvalidRequest

GREETING = "/lmstudio-greeting"
# The parts of the protocol, each a WebSocket.
NAMESPACES = ("/llm", "/system", "/files", "/repository", "/diagnostics", "/plugins", "/runtime")


def endpoints() -> list[Endpoint]:
    """Refusals of all of it."""
    refused = "Refused: use OpenAI's API, or LM Studio's REST API"
    return [Endpoint("GET", path, _refuse, refused) for path in (GREETING, *NAMESPACES, "/embedding")]


async def _refuse(request: Request) -> NoReturn:
    problem = "This server does not speak the WebSocket protocol of LM Studio's SDKs"
    remedy = "Use an OpenAI client with the base URL /v1, or LM Studio's REST API at /api/v1."
    raise InvalidRequest(problem, remedy, status=501)
