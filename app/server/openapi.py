"""GET /openapi.json: every route, with each field that it takes and gives, its bounds, and the errors there are.

Made of the endpoints and of the types that requests are decoded to, so that it cannot say anything else than they do.
OpenAPI 3.1, whose schemas are JSON schemas. Refuses to know which endpoints there are.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from app.server.endpoint import TEXT, Endpoint
from app.server.openai_errors import ErrorBody

Json = dict[str, Any]

JSON = "application/json"
_PARAMETER = re.compile(r"{(\w+)(?::path)?}")
_REF = "#/components/schemas/{name}"
_KEY = "key"  # what the one way to show a key is called

_FAILURES: Mapping[int, str] = {
    400: "Something is wrong with the request; the message names the field.",
    401: "A key is needed, and none or a wrong one was sent.",
    403: "A web page that is not let in, or a name that this server does not go by.",
    404: "There is no such model or path; the message says what there is.",
    413: "The body is too long.",
    415: "The body is not of type application/json.",
    429: "The caller has too many requests under way; Retry-After says when to come back.",
    500: "The server made a mistake.",
    503: "The server cannot serve now.",
}
_WITHOUT_BODY = (401, 403, 404, 500, 503)


class OpenAPI:
    """Describes endpoints, its own included."""

    def __init__(self, endpoints: Sequence[Endpoint], models: Sequence[str]) -> None:
        """`models` are the names that requests may give."""
        self.endpoint = Endpoint("GET", "/openapi.json", self.describe, "This description", gives=Description)
        self._body = msgspec.json.encode(description([*endpoints, self.endpoint], models))

    async def describe(self, request: Request) -> Response:
        return Response(self._body, media_type=JSON)


class Description(Struct):
    """What is certain of a description."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: list[dict[str, list[str]]]


def description(endpoints: Sequence[Endpoint], models: Sequence[str]) -> Description:
    """All of it."""
    types = {it for one in endpoints for it in (one.takes, one.gives, one.streams, one.fails_with) if _is_type(it)}
    _, schemas = msgspec.json.schema_components(sorted({*types, ErrorBody}, key=str), ref_template=_REF)
    for one in endpoints:
        if one.takes is not None:
            schemas[one.takes.__name__]["properties"]["model"]["enum"] = list(models)
    paths: dict[str, Json] = {}
    for one in endpoints:
        paths.setdefault(_PARAMETER.sub(r"{\1}", one.path), {})[one.method.lower()] = _operation(one)
    keys = {_KEY: {"type": "http", "scheme": "bearer"}}
    return Description(
        "3.1.0",
        {"title": "Inglenook", "version": "1"},
        paths,
        {"schemas": schemas, "securitySchemes": keys},
        [{}, {_KEY: []}],  # whether a key is needed is the user's choice
    )


def _is_type(it: object) -> bool:
    return isinstance(it, type)


def _operation(endpoint: Endpoint) -> Json:
    names = _PARAMETER.findall(endpoint.path)
    told: Json = {"summary": endpoint.summary, "responses": _responses(endpoint)}
    if names:
        told["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if endpoint.takes is not None:
        told["requestBody"] = {"required": True, "content": _content(JSON, endpoint.takes)}
    return told


def _responses(endpoint: Endpoint) -> Json:
    failures = _FAILURES if endpoint.takes is not None else _WITHOUT_BODY
    told = {
        str(status): {"description": _FAILURES[status], "content": _content(JSON, ErrorBody)} for status in failures
    }
    if endpoint.fails_with is not None:
        told["503"]["content"] = _content(JSON, endpoint.fails_with)
    if endpoint.gives is None:
        return told
    content = {TEXT: {}} if endpoint.gives == TEXT else _content(JSON, endpoint.gives)
    if endpoint.streams is not None:
        content |= {"text/event-stream": {"schema": _event(endpoint.streams)}}
    return {"200": {"description": "The reply", "content": content}, **told}


def _event(chunk: type[Struct]) -> Json:
    """Of each server-sent event: a chunk, or the end."""
    told = {"contentMediaType": JSON, "contentSchema": {"$ref": _REF.format(name=chunk.__name__)}}
    data = {"type": "string", "anyOf": [told, {"const": "[DONE]"}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _content(media_type: str, kind: "type[Struct] | str") -> Json:
    name = kind if isinstance(kind, str) else kind.__name__
    return {media_type: {"schema": {"$ref": _REF.format(name=name)}}}
