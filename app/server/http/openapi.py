"""GET /openapi.json: every route, with each field that it takes and gives, its bounds, and the errors there are.

Made of the endpoints and of the types that requests are decoded to, so that it cannot say anything else than they do.
OpenAPI 3.1, whose schemas are JSON schemas. Refuses to know which endpoints there are.
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

    def __init__(self, endpoints: Sequence[Endpoint], models: Sequence[str], errors: ErrorFormat) -> None:
        """`models` are the names that requests may give. `errors` is the format of errors of endpoints without one."""
        self.endpoint = Endpoint("GET", "/openapi.json", self.describe, "This description", gives=Description)
        self._endpoints = [*endpoints, self.endpoint]
        self._models = models
        self._errors = errors

    async def describe(self, request: Request) -> Response:
        return Response(self._body, media_type=JSON)

    @cached_property
    def _body(self) -> bytes:
        """Written when somebody asks for it, since few do."""
        return msgspec.json.encode(description(self._endpoints, self._models, self._errors))


class Description(Struct):
    """What is certain of a description."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: list[dict[str, list[str]]]


def description(endpoints: Sequence[Endpoint], models: Sequence[str], errors: ErrorFormat) -> Description:
    """All of it."""
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
        [{}, {_KEY: []}],  # whether a key is needed is the user's choice
    )


class _Schemas:
    """The schemas of all that endpoints take and give, each by a name of its own where two types have the same."""

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
        """Where a request names a model, these are the names there are."""
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
    """Each event or line: a piece of the reply, or the end."""
    media_type = framing.media_type.partition(";")[0]
    if media_type != "text/event-stream":
        return {media_type: {"schema": piece}}
    ends = [{"const": "[DONE]"}] if framing.end else []
    data = {"type": "string", "anyOf": [{"contentMediaType": JSON, "contentSchema": piece}, *ends]}
    return {media_type: {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}}


def _content(schemas: _Schemas, kind: type[Struct]) -> Json:
    return {JSON: {"schema": schemas.reference(kind)}}
