"""Drafts in requests and replies: the fields that control them, and the counts that report them."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from engine.drafting.drafter import Drafter
from engine.request import Request
from tests.app.server.live_server import LiveServer, controlled_engine

LENGTH = 40  # tokens of a reply


class FreeDrafts(Drafter):
    """A drafter for an engine whose larger steps take no longer. Records the requests that it drafts for."""

    def __init__(self) -> None:
        super().__init__(lambda tokens: 1.0)
        self.requests: list[Request] = []

    def draft(self, request: Request) -> Any:
        self.requests.append(request)
        return super().draft(request)


@pytest.fixture
def drafter() -> FreeDrafts:
    return FreeDrafts()


@pytest.fixture
def server(tokenizer: Tokenizer, renderer: ChatTemplateRenderer, drafter: FreeDrafts) -> Iterator[LiveServer]:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    engine._scheduler._verification.drafter = drafter
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        yield server
    engine.assert_empty()


def reply(server: LiveServer, **asked: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": LENGTH, "ignore_eos": True, **asked}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=None)  # noqa: S113
    assert found.is_success, found.text
    read: dict[str, Any] = found.json()
    return read


def accepted(server: LiveServer) -> dict[str, float]:
    """Return the accepted tokens by source, as /metrics reports them."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {sample.labels["source"]: sample.value for sample in families["ingle:accepted_tokens"].samples}


def test_repeated_reply_reports_its_drafts(server: LiveServer) -> None:
    first, again = reply(server), reply(server)
    assert again["choices"] == first["choices"]
    assert first["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    assert "draft_n" not in first["timings"]
    details, timings = again["usage"]["completion_tokens_details"], again["timings"]
    assert details["accepted_prediction_tokens"] > LENGTH // 2
    assert timings["draft_n_accepted"] == details["accepted_prediction_tokens"]
    assert timings["draft_n"] == timings["draft_n_accepted"] + details["rejected_prediction_tokens"]
    assert accepted(server)["corpus"] == timings["draft_n_accepted"]


def test_request_can_turn_drafts_off(server: LiveServer, drafter: FreeDrafts) -> None:
    first = reply(server)
    drafter.requests.clear()
    again = reply(server, drafts=False)
    assert again["choices"] == first["choices"]
    assert drafter.requests == []
    assert again["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_other_cache_salt_has_no_drafts(server: LiveServer) -> None:
    reply(server, cache_salt="a")
    again = reply(server, cache_salt="b")
    assert again["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0


@pytest.mark.parametrize(
    "content", ["the old file", [{"type": "text", "text": "the old "}, {"type": "text", "text": "file"}]]
)
def test_predicted_content_becomes_tokens_to_draft_from(
    server: LiveServer, drafter: FreeDrafts, tokenizer: Tokenizer, content: Any
) -> None:
    plain = reply(server, drafts=False)
    predicted = reply(server, prediction={"type": "content", "content": content})
    assert predicted["choices"] == plain["choices"]
    assert drafter.requests[-1].params.prediction == tuple(tokenizer.encode("the old file"))


def test_invalid_prediction_is_refused(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "prediction": {"type": "file", "content": "a"}}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False)
    assert found.status_code == 400
    assert "prediction" in found.text
