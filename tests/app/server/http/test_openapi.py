"""The OpenAPI description is valid and complete, and replies match it."""

import json
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import msgspec
import pytest

from app.server.application import create_application
from app.server.dialects.openai.chat_requests import ChatCompletionRequest
from tests.app.server.live_server import LiveServer

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2},
    "/v1/completions": {"prompt": "Hi", "logprobs": 2, "echo": True, "n": 2},
    "/v1/responses": {"input": "Hi", "top_logprobs": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}]},
}
LAST_SAYS_SO = ("/v1/messages", "/v1/responses")  # streams that end without a [DONE] event


@pytest.fixture(scope="module")
def described(hash_server: LiveServer) -> dict[str, Any]:
    answer = httpx.get(f"{hash_server.url}/openapi.json", trust_env=False)
    assert answer.headers["content-type"] == "application/json"
    reported: dict[str, Any] = answer.json()
    return reported


def validate(described: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    jsonschema.Draft202012Validator({**schema, "components": described["components"]}).validate(value)


def schema_of(described: dict[str, Any], path: str, method: str, status: int, kind: str = "application/json") -> Any:
    return described["paths"][path][method]["responses"][str(status)]["content"][kind]["schema"]


def test_every_route_is_described_with_valid_schemas(hash_server: LiveServer, described: dict[str, Any]) -> None:
    routes: Any = create_application(hash_server.models).routes
    paths = {(route.path.replace(":path", ""), route.method.lower()) for route in routes}
    assert {(path, method) for path, methods in described["paths"].items() for method in methods} == paths
    assert ("/openapi.json", "get") in paths
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = set(described["components"]["schemas"])
    for reference in json.dumps(described).split("#/components/schemas/")[1:]:
        assert reference.partition('"')[0] in names


def test_fields_and_bounds_match_the_table(described: dict[str, Any]) -> None:
    schema = described["components"]["schemas"]["ChatCompletionRequest"]
    assert list(schema["properties"]) == list(ChatCompletionRequest.__struct_encode_fields__)
    assert schema["required"] == ["messages"]
    assert schema["properties"]["model"]["enum"] == ["hash", None]
    assert schema["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 100.0}


@pytest.mark.parametrize("path", ASKED)
def test_replies_match_their_schemas(hash_server: LiveServer, described: dict[str, Any], path: str) -> None:
    asked = {"model": "hash", "max_tokens": 3, "seed": 1, **ASKED[path]}
    validate(described, described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"], asked)
    with httpx.Client(base_url=hash_server.url, trust_env=False, timeout=None) as http:  # noqa: S113
        validate(described, schema_of(described, path, "post", 200), http.post(path, json=asked).json())
        refused = http.post(path, json={**asked, "temperature": 101})
        validate(described, schema_of(described, path, "post", 400), refused.json())
        events = http.post(path, json={**asked, "stream": True, "stream_options": {"include_usage": True}}).text
    frames = [frame.rpartition("data: ")[2] for frame in events.split("\n\n")[:-1]]
    *chunks, done = [*frames, "[DONE]"] if path in LAST_SAYS_SO else frames
    assert done == "[DONE]"
    for chunk in chunks:
        data = schema_of(described, path, "post", 200, "text/event-stream")["properties"]["data"]
        validate(described, data["anyOf"][0]["contentSchema"], msgspec.json.decode(chunk))


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/hash", "/openapi.json"])
def test_replies_to_get_requests_match_their_schemas(
    hash_server: LiveServer, described: dict[str, Any], path: str
) -> None:
    answer = httpx.get(f"{hash_server.url}{path}", trust_env=False)
    validate(described, schema_of(described, path.replace("models/hash", "models/{model}"), "get", 200), answer.json())
