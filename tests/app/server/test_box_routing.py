"""Requests for models of another machine, between two servers with different keys and TLS."""

import asyncio
import io
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from app.client.boxes import models_of
from app.client.http import ServerUnreachable
from app.generation.template import ChatTemplateRenderer
from app.settings.boxes import forget_box, keep_box
from app.text.tokenizer import Tokenizer
from tests.app.server.shared_machine import LAPTOP_KEY, TwoMachines, two_machines
from tests.support.processes import HANGING_SECONDS, until

MESSAGES = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 20},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 20},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 20, "store": False},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 20, "temperature": 0, "seed": 1, "top_k": 0}},
    "/api/generate": {"prompt": "Hi", "options": {"num_predict": 20, "temperature": 0, "seed": 1, "top_k": 0}},
    "/completion": {"prompt": "Hi", "n_predict": 20},
    "/api/v0/chat/completions": {"messages": MESSAGES, "max_tokens": 20},
}


@pytest.fixture(autouse=True)
def _lists_wait_for_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each list of models wait for the box, which answers late on a busy machine."""
    monkeypatch.setattr("app.server.boxes.LIST_SECONDS", HANGING_SECONDS)


@pytest.fixture(scope="module")
def machines(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> Iterator[TwoMachines]:
    with two_machines(tmp_path_factory.mktemp("machines"), tokenizer, renderer) as machines:
        yield machines


def to_laptop(machines: TwoMachines) -> httpx.Client:
    return httpx.Client(base_url=machines.laptop.url, headers={"authorization": f"Bearer {LAPTOP_KEY}"}, timeout=60)


def to_box(machines: TwoMachines) -> httpx.Client:
    headers = {"authorization": f"Bearer {machines.entry.key}", "x-ingle-box": "gpu", "host": "localhost"}
    return httpx.Client(base_url=machines.box.url, headers=headers, verify=False, timeout=60)  # noqa: S501


# ids, times, and speeds, which differ between two equal replies; the cache has the prompt the second time
_DIFFERENT = re.compile(
    rb'"(?:id|item_id|response_id|created|created_at|completed_at|\w+_at|\w*duration|\w+_ms|\w+_per_second|\w*tokens_details'
    rb'|\w*cached?\w*|tokens_per_second|time_to_first_token|generation_time|input_tokens|\w+_n|obfuscation)":'
    rb'(?:"[^"]*"|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|[^,}]*)'
)


def without_times(reply: bytes) -> bytes:
    return _DIFFERENT.sub(b"", re.sub(rb"\b(?:resp|msg|chatcmpl|cmpl)[_-]\w+", b"", reply))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_reply_equals_that_of_the_box(machines: TwoMachines, path: str, stream: bool) -> None:
    body = {"model": "gpu/big", "stream": stream, "seed": 1, "temperature": 0, **ASKED[path]}
    with to_laptop(machines) as laptop, to_box(machines) as box:
        direct, passed = box.post(path, json=body), laptop.post(path, json=body)
    assert (direct.status_code, passed.status_code) == (200, 200), passed.text
    assert passed.headers["content-type"] == direct.headers["content-type"]
    assert without_times(passed.content) == without_times(direct.content)
    if path != "/completion":
        assert b'"gpu/big"' in passed.content
    assert b'"big"' not in passed.content


def test_openai_client_uses_a_model_of_the_box(machines: TwoMachines) -> None:
    with openai.OpenAI(base_url=f"{machines.laptop.url}/v1", api_key=LAPTOP_KEY, max_retries=0) as api:
        use_openai(api)


def use_openai(api: openai.OpenAI) -> None:
    names = [model.id for model in api.models.list()]
    assert names == ["small", "gpu/big"]
    assert api.models.retrieve("gpu/big").id == "gpu/big"
    chunks = list(
        api.chat.completions.create(
            model="gpu/big", messages=[{"role": "user", "content": "Hi"}], stream=True, max_tokens=9
        )
    )
    assert {chunk.model for chunk in chunks} == {"gpu/big"}
    own = api.chat.completions.create(model="small", messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
    assert own.model == "small"
    with pytest.raises(openai.NotFoundError, match="'gpu/none' does not exist"):
        api.chat.completions.create(model="gpu/none", messages=[{"role": "user", "content": "Hi"}])


def test_anthropic_client_uses_a_model_of_the_box(machines: TwoMachines) -> None:
    with anthropic.Anthropic(base_url=machines.laptop.url, api_key=LAPTOP_KEY, max_retries=0) as api:
        listed = api.models.list()
        assert [model.id for model in listed.data] == ["small", "gpu/big"]
        assert listed.last_id == "gpu/big"
        with api.messages.stream(model="gpu/big", max_tokens=9, messages=[{"role": "user", "content": "Hi"}]) as stream:
            assert stream.get_final_message().model == "gpu/big"


def test_ollama_client_uses_a_model_of_the_box(machines: TwoMachines) -> None:
    with ollama.Client(host=machines.laptop.url, headers={"authorization": f"Bearer {LAPTOP_KEY}"}) as api:
        assert [model.model for model in api.list().models] == ["small", "gpu/big"]
        assert [model.model for model in api.ps().models] == ["small", "gpu/big"]
        assert api.show("gpu/big").modelinfo
        parts = list(api.chat("gpu/big:latest", MESSAGES, stream=True, options={"num_predict": 9}))
    assert {part.model for part in parts} == {"gpu/big:latest"}


@pytest.mark.parametrize("path", ["/api/v0/models", "/api/v1/models", "/models"])
def test_lists_of_all_apis_name_models_of_the_box(machines: TwoMachines, path: str) -> None:
    with to_laptop(machines) as laptop:
        [entries] = (value for value in laptop.get(path).json().values() if isinstance(value, list))
    assert [entry.get("id") or entry["key"] for entry in entries] == ["small", "gpu/big"]


def test_model_in_the_query_or_with_an_escaped_slash_is_found(machines: TwoMachines) -> None:
    with to_laptop(machines) as laptop:
        assert laptop.get("/inglenook/engine", params={"model": "gpu/big"}).json()["model"] == "gpu/big"
        escaped = rb'{"model": "gpu\/big", "prompt": "Hi", "max_tokens": 1}'
        reply = laptop.post("/v1/completions", content=escaped, headers={"content-type": "application/json"})
    assert reply.json()["model"] == "gpu/big"


def test_service_class_and_options_reach_the_box(machines: TwoMachines) -> None:
    body = {"model": "gpu/big", "prompt": "Hi", "max_tokens": 2}
    with to_laptop(machines) as laptop:
        wrong = laptop.post("/v1/completions", json=body, headers={"x-ingle-class": "urgent"})
    assert (wrong.status_code, "X-Ingle-Class: 'urgent'" in wrong.text) == (400, True)


def test_stored_response_of_the_box_is_found(machines: TwoMachines) -> None:
    with openai.OpenAI(base_url=f"{machines.laptop.url}/v1", api_key=LAPTOP_KEY, max_retries=0) as api:
        made = api.responses.create(model="gpu/big", input="Hi", max_output_tokens=16)
        again = api.responses.retrieve(made.id)
        assert (again.id, again.model, again.output_text) == (made.id, "gpu/big", made.output_text)
        more = api.responses.create(model="gpu/big", input="More", previous_response_id=made.id, max_output_tokens=16)
        assert more.previous_response_id == made.id
        api.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(made.id)
        own = api.responses.create(model="small", input="Hi", max_output_tokens=16)
        assert api.responses.retrieve(own.id).model == "small"


def test_request_with_a_nonce_is_seen_on_the_laptop(machines: TwoMachines) -> None:
    nonce = f"ingle-probe-{'0' * 32}"
    with to_laptop(machines) as laptop:
        for model in ("gpu/big", "small"):
            laptop.post("/v1/completions", json={"model": model, "prompt": nonce, "max_tokens": 2})
        seen = laptop.get("/inglenook/seen", params={"nonce": nonce}).json()["requests"]
    assert [(one["model"], one["status"], one["ended"]) for one in seen] == [
        ("gpu/big", 200, True),
        ("small", 200, True),
    ]


def test_disconnect_ends_the_request_on_the_box(machines: TwoMachines) -> None:
    body = {"model": "gpu/big", "prompt": "Hi", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with machines.box_runner.held() as steps, to_laptop(machines) as laptop:
        steps.release(5)
        with laptop.stream("POST", "/v1/completions", json=body) as reply:
            next(reply.iter_lines())
            assert machines.box.engine.has_work
        steps.release(1)  # the step that runs
        until(lambda: not machines.box.streams._live)
    until(lambda: not machines.box.engine.has_work)
    machines.box.engine.assert_empty()


def test_request_with_a_wrong_key_does_not_reach_the_box(machines: TwoMachines) -> None:
    body = {"model": "gpu/big", "prompt": "Hi", "max_tokens": 2}
    plans = machines.box_runner.plans
    wrong = httpx.post(f"{machines.laptop.url}/v1/completions", json=body, headers={"x-api-key": machines.entry.key})
    assert (wrong.status_code, machines.box_runner.plans) == (401, plans)


def test_box_ignores_the_key_of_the_laptop(machines: TwoMachines) -> None:
    with to_box(machines) as box:
        assert box.get("/v1/models", headers={"authorization": f"Bearer {LAPTOP_KEY}"}).status_code == 401


ERROR_FORMATS: dict[str, Callable[[Any], str]] = {
    "/v1/chat/completions": lambda error: error["error"]["message"],
    "/v1/messages": lambda error: (error["type"] == "error") * error["error"]["message"],
    "/api/chat": lambda error: error["error"],
}


def test_box_that_is_away_returns_503_with_a_local_model(
    tmp_path: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> None:
    with two_machines(tmp_path, tokenizer, renderer) as machines, to_laptop(machines) as laptop:
        assert len(laptop.get("/v1/models").json()["data"]) == 2
        machines.box.stop()
        for path, message in ERROR_FORMATS.items():
            refused = laptop.post(path, json={"model": "gpu/big", **ASKED[path]})
            assert refused.status_code == 503
            assert 1 <= int(refused.headers["retry-after"]) <= 6
            said = message(refused.json())
            assert said.startswith("gpu does not respond")
            assert said.endswith("Until then, this machine has small.")
        assert [model["id"] for model in laptop.get("/v1/models").json()["data"]] == ["small"]


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    written, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(written), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


def test_logs_and_errors_contain_no_key(machines: TwoMachines, logged: io.StringIO) -> None:
    url, headers = machines.laptop.url, {"authorization": f"Bearer {LAPTOP_KEY}"}
    wrong = {"model": "gpu/none", "prompt": "Hi", "max_tokens": 2}
    logging.getLogger("tests").debug("logging is active")
    said = ""
    for body in ({**wrong, "model": "gpu/big"}, wrong):
        said += httpx.post(f"{url}/v1/completions?key={machines.entry.key[:8]}", json=body, headers=headers).text
    text = logged.getvalue()
    assert "logging is active" in text
    own_log = [line for line in text.splitlines() if not line.startswith("HTTP Request: POST http://")]
    assert not [line for line in [*own_log, said] if machines.entry.key[:8] in line or LAPTOP_KEY in line]


def test_wrong_certificate_is_refused_with_both_fingerprints(
    machines: TwoMachines, tmp_path: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> None:
    expected = "0" * 64
    wrong = replace(machines.entry, name="other", fingerprint=expected)
    with pytest.raises(ServerUnreachable, match=f"{machines.entry.fingerprint}, and {expected} is expected"):
        asyncio.run(models_of(wrong))
    state_dir = machines.laptop_state
    keep_box(wrong, state_dir)
    try:
        with to_laptop(machines) as laptop:
            refused = laptop.post("/v1/completions", json={"model": "other/big", "prompt": "Hi"})
    finally:
        forget_box("other", state_dir)
    assert refused.status_code == 502
    assert f"{machines.entry.fingerprint}, and {expected} is expected" in refused.json()["error"]["message"]


def test_change_of_the_boxes_applies_to_a_running_server(machines: TwoMachines) -> None:
    with to_laptop(machines) as laptop:
        keep_box(replace(machines.entry, name="second"), machines.laptop_state)
        assert [model["id"] for model in laptop.get("/v1/models").json()["data"]] == ["small", "gpu/big", "second/big"]
        forget_box("second", machines.laptop_state)
        assert laptop.post("/v1/completions", json={"model": "second/big", "prompt": "Hi"}).status_code == 404


def test_names_of_a_shared_machine_have_the_prefix_of_the_caller_only(machines: TwoMachines) -> None:
    with to_box(machines) as box:
        assert box.get("/v1/models").json()["data"][0]["id"] == "gpu/big"
        assert box.get("/v1/models", headers={"x-ingle-box": "No Name"}).json()["data"][0]["id"] == "big"
