"""GET /openapi.json: every route, its request fields with their bounds, its replies, and its errors.

The description is derived from the endpoints and from the types that requests are decoded to, so that it cannot
disagree with them. OpenAPI 3.1, whose schemas are JSON schemas.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from app.server.http.endpoint import TEXT, Endpoint, ErrorFormat, Framing

Json = dict[str, Any]

JSON = "application/json"
_PARAMETER = re.compile(r"{(\w+)(?::path)?}")
_REF = "#/components/schemas/{name}"
_KEY = "key"  # name of the security scheme

_FAILURES: Mapping[int, str] = {
    400: "The request is invalid. The message names the field.",
    401: "The API key is missing or unknown.",
    403: "The web page's origin or the Host header is not allowed.",
    404: "The model or path does not exist. The message lists the models.",
    413: "The body is too long.",
    415: "The body is not of type application/json.",
    429: "The caller has too many requests in progress. The Retry-After header states when to try again.",
    500: "The server failed.",
    503: "The server cannot answer requests at the moment.",
}
_WITHOUT_BODY = (401, 403, 404, 500, 503)


class OpenAPI:
    """Describes endpoints, including its own."""

    def __init__(self, endpoints: Sequence[Endpoint], models: Sequence[str], errors: ErrorFormat) -> None:
        """Set the endpoints, the model names that requests may use, and the default error format."""
        self.endpoint = Endpoint("GET", "/openapi.json", self.describe, "This description", gives=Description)
        self._endpoints = [*endpoints, self.endpoint]
        self._models = models
        self._errors = errors

    async def describe(self, request: Request) -> Response:
        return Response(self._body, media_type=JSON)

    @cached_property
    def _body(self) -> bytes:
        """The encoded description. It is encoded at the first request, because few clients ask for it."""
        return msgspec.json.encode(description(self._endpoints, self._models, self._errors))


class Description(Struct):
    """The top level of an OpenAPI description."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: list[dict[str, list[str]]]


def description(endpoints: Sequence[Endpoint], models: Sequence[str], errors: ErrorFormat) -> Description:
    """Describe all endpoints."""
    schemas = _Schemas(endpoints, errors)
    for one in endpoints:
        schemas.name_models(one.takes, models)
    paths: dict[str, Json] = {}
    for one in endpoints:
        paths.setdefault(_PARAMETER.sub(r"{\1}", one.path), {})[one.method.lower()] = _operation(one, schemas)
    keys = {_KEY: {"type": "http", "scheme": "bearer"}}
    return Description(
        "3.1.0",
        {"title": "Inglenook", "version": "1"},
        paths,
        {"schemas": schemas.components, "securitySchemes": keys},
        [{}, {_KEY: []}],  # a key is optional here, because the settings decide whether one is needed
    )


class _Schemas:
    """The schemas of all types of requests and replies. Types of the same name get different names."""

    def __init__(self, endpoints: Sequence[Endpoint], errors: ErrorFormat) -> None:
        self.errors = errors
        described = [it for one in endpoints for it in (one.takes, one.gives, one.streams, one.fails_with)]
        types = [it for it in described if it is not None and it != TEXT]
        types += [errors.type, *(one.errors.type for one in endpoints if one.errors is not None)]
        types = sorted(dict.fromkeys(types), key=str)
        references, self.components = msgspec.json.schema_components(types, ref_template=_REF)
        self._references = dict(zip(types, references, strict=True))

    def reference(self, kind: Any) -> Json:
        return self._references[kind]

    def name_models(self, body: Any, models: Sequence[str]) -> None:
        """List the names of models as the values of the field `model` of a request."""
        if body is None:
            return
        name = self.reference(body)["$ref"].rpartition("/")[2]
        if "model" in (fields := self.components[name]["properties"]):
            nullable = any(kind == {"type": "null"} for kind in fields["model"].get("anyOf", ()))
            fields["model"]["enum"] = [*models, None] if nullable else list(models)


def _operation(endpoint: Endpoint, schemas: _Schemas) -> Json:
    names = _PARAMETER.findall(endpoint.path)
    described: Json = {"summary": endpoint.summary, "responses": _responses(endpoint, schemas)}
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if endpoint.takes is not None:
        described["requestBody"] = {"required": True, "content": _content(schemas, endpoint.takes)}
    return described


def _responses(endpoint: Endpoint, schemas: _Schemas) -> Json:
    failures = _FAILURES if endpoint.takes is not None else _WITHOUT_BODY
    error = (endpoint.errors or schemas.errors).type
    described = {
        str(status): {"description": _FAILURES[status], "content": _content(schemas, error)} for status in failures
    }
    if endpoint.fails_with is not None:
        described["503"]["content"] = _content(schemas, endpoint.fails_with)
    if endpoint.gives is None:
        return described
    content = {TEXT: {}} if endpoint.gives == TEXT else _content(schemas, endpoint.gives)
    if endpoint.streams is not None:
        content |= _stream(endpoint.framing, schemas.reference(endpoint.streams))
    return {"200": {"description": "The reply", "content": content}, **described}


def _stream(framing: Framing, piece: Json) -> Json:
    """Describe a stream: each event or line is a chunk or the end."""
    media_type = framing.media_type.partition(";")[0]
    if media_type != "text/event-stream":
        return {media_type: {"schema": piece}}
    ends = [{"const": "[DONE]"}] if framing.end else []
    data = {"type": "string", "anyOf": [{"contentMediaType": JSON, "contentSchema": piece}, *ends]}
    return {media_type: {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}}


def _content(schemas: _Schemas, kind: type[Struct]) -> Json:
    return {JSON: {"schema": schemas.reference(kind)}}
