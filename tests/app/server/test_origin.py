"""The origin of a request: every field and header, their precedence, and the origin that the engine receives."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.requests import Request as HTTPRequest

from app.server.dialects.openai.chat_requests import ChatCompletionRequest, ChatMessage
from app.server.dialects.openai.completion_requests import CompletionRequest
from app.server.dialects.openai.requests import GenerationRequest
from app.server.http.access import CALLER, THIS_USER
from app.server.http.errors import InvalidRequest
from app.server.origin import CLASS_HEADER, CLASS_NAMES, origin_of
from engine.core import Engine
from engine.request import Origin, Request, ServiceClass
from tests.app.server.live_server import LiveServer
from tests.app.server.test_bad_requests import CHAT, COMPLETION, VALID

BACKGROUND, NORMAL, INTERACTIVE = ServiceClass.BACKGROUND, ServiceClass.NORMAL, ServiceClass.INTERACTIVE


def origin(path: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Origin:
    """Return the origin of the owner's request with these fields and headers."""
    asked: GenerationRequest = CompletionRequest(model="hash", prompt="Hi", **fields)
    if path == CHAT:
        asked = ChatCompletionRequest(model="hash", messages=[ChatMessage("user", "Hi")], **fields)
    scope = {"type": "http", "headers": Headers(headers or {}).raw, "state": {CALLER: THIS_USER}}
    return origin_of(HTTPRequest(scope), asked.origin_fields())


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_request_without_fields_has_class_normal(path: str) -> None:
    assert origin(path) == Origin(NORMAL, 0, "")


def test_infill_is_interactive() -> None:
    assert origin(COMPLETION, suffix="the end").service is INTERACTIVE
    assert origin(COMPLETION, suffix="").service is NORMAL
    assert origin(COMPLETION, suffix="the end", service_class="background").service is BACKGROUND


TIERS: Mapping[str | None, ServiceClass | None] = {
    None: None, "auto": None, "default": None, "scale": None, "flex": BACKGROUND, "priority": INTERACTIVE,
}  # fmt: skip


def test_field_wins_over_header_and_header_over_tier() -> None:
    for field, header, tier in itertools.product([None, *CLASS_NAMES], [None, *CLASS_NAMES], TIERS):
        headers = {} if header is None else {CLASS_HEADER: header}
        said = [CLASS_NAMES.get(field or ""), CLASS_NAMES.get(header or ""), TIERS[tier], NORMAL]
        expected = next(one for one in said if one is not None)
        assert origin(CHAT, headers, service_class=field, service_tier=tier).service is expected


def test_store_false_and_background_requests_are_not_stored() -> None:
    for field, store, path in itertools.product([None, *CLASS_NAMES], [None, True, False], [CHAT, COMPLETION]):
        assert origin(path, service_class=field, store=store).stored == (store is not False and field != "background")


def test_header_name_is_case_insensitive() -> None:
    assert origin(CHAT, {"x-ingle-class": "background"}).service is BACKGROUND


def test_unknown_class_in_the_header_is_always_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        origin(CHAT, {CLASS_HEADER: "urgent"}, service_class="normal")
    assert refused.value.parameter == CLASS_HEADER


def test_service_class_field_accepts_every_class() -> None:
    literal, _ = get_args(get_type_hints(GenerationRequest)["service_class"])
    assert set(get_args(literal)) == CLASS_NAMES.keys() == {service.name.lower() for service in ServiceClass}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("fields", "headers", "expected"),
    [
        ({}, {}, Origin(NORMAL)),
        ({"service_class": "interactive", "priority": 100}, {}, Origin(INTERACTIVE, 100)),
        (
            {"service_class": "background", "priority": -100},
            {CLASS_HEADER: "interactive"},
            Origin(BACKGROUND, -100, "", False),
        ),
        (
            {"service_class": None, "cache_salt": "mine"},
            {CLASS_HEADER: "background"},
            Origin(BACKGROUND, 0, "mine", False),
        ),
        ({"service_tier": "flex", "store": True}, {}, Origin(BACKGROUND, stored=False)),
        ({"service_tier": "priority", "store": None}, {CLASS_HEADER: "normal"}, Origin(NORMAL)),
        ({"store": True}, {}, Origin(NORMAL)),
        ({"store": False, "priority": 3}, {}, Origin(NORMAL, 3, stored=False)),
    ],
)
def test_engine_receives_the_origin_of_every_choice(
    hash_server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    headers: dict[str, str],
    expected: Origin,
) -> None:
    made: list[Request] = []
    make = Engine.request

    def remembering(engine: Engine[Any], *arguments: Any) -> Request:
        made.append(make(engine, *arguments))
        return made[-1]

    monkeypatch.setattr(Engine, "request", remembering)
    response = httpx.post(hash_server.url + path, json={**VALID[path], "n": 2, **fields}, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    client = f"python-httpx/{httpx.__version__}"
    reply = response.json()["id"] if path == CHAT else ""
    assert [request.origin for request in made] == [replace(expected, client=client, reply=reply)] * 2
