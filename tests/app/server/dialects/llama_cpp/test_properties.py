"""The endpoints /props and /slots of llama.cpp's server."""

import functools

import httpx
import pytest

from app.generation.template import ChatTemplateRenderer
from app.server.dialects.llama_cpp import endpoints
from app.server.http.reply import StreamedReply
from app.text.tokenizer import Tokenizer
from tests.app.server.dialects.llama_cpp.test_completions import complete
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.support.processes import until


def test_reported_defaults_equal_those_of_an_empty_request(hash_server: LiveServer) -> None:
    reported = httpx.get(f"{hash_server.url}/props", trust_env=False).json()
    params = reported["default_generation_settings"]["params"]
    settings = complete(hash_server, n_predict=-1, top_k=40, stop=["q"])["generation_settings"]
    assert params["seed"] == 2**32 - 1
    assert {**params, "seed": 0} == {**settings, "seed": 0, "stop": []}
    assert reported["default_generation_settings"]["n_ctx"] == 2048


def test_properties_cannot_be_changed(hash_server: LiveServer) -> None:
    refused = httpx.post(f"{hash_server.url}/props", json={}, trust_env=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, 405)


def test_slots_cannot_be_saved(hash_server: LiveServer) -> None:
    refused = httpx.post(f"{hash_server.url}/slots/0?action=save", json={"filename": "a"}, trust_env=False)
    assert (refused.status_code, refused.json()["error"]["type"]) == (501, "not_supported_error")


def test_slots_report_running_requests(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stream opens with its first ping, because no step runs until both requests are submitted.
    hurried = functools.partial(StreamedReply, first_ping_seconds=0.001)
    monkeypatch.setattr(endpoints, "StreamedReply", hurried)
    engine, runner = controlled_engine(tokenizer.vocab_size, running=2)
    body = {"prompt": "Hi", "n_predict": 100, "ignore_eos": True, "stream": True}
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        slots = f"{server.url}/slots"
        assert [slot["is_processing"] for slot in httpx.get(slots, trust_env=False).json()] == [False, False]
        with (
            runner.held() as steps,
            httpx.stream("POST", f"{server.url}/completion", json=body, trust_env=False, timeout=60),
            httpx.stream("POST", f"{server.url}/completion", json=body, trust_env=False, timeout=60),
        ):
            server.step_until(steps, running=2, waiting=0)
            reported = httpx.get(slots, trust_env=False).json()
            assert [(slot["id"], slot["is_processing"], slot["n_ctx"]) for slot in reported] == [
                (0, True, 2048),
                (1, True, 2048),
            ]
            assert httpx.get(f"{slots}?fail_on_no_slot=1", trust_env=False).status_code == 503
        until(lambda: not any(slot["is_processing"] for slot in httpx.get(slots, trust_env=False).json()))
        assert httpx.get(f"{slots}?fail_on_no_slot=1", trust_env=False).status_code == 200
    engine.assert_empty()
