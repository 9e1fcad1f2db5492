"""The timings of replies and the progress of prefill in replies."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from app.generation.cache_report import CacheReport
from app.generation.events import ReplyEnd, TokenCounts
from app.generation.template import ChatTemplateRenderer
from app.generation.token_streams import MAX_BATCH
from app.server.usage import timings_of
from app.text.tokenizer import Tokenizer
from engine.request import FinishReason, TokenSources
from tests.app.server.live_server import LiveServer, controlled_engine

MESSAGES = [{"role": "user", "content": "A long question. " * 20}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "A long text. " * 20},
}


@pytest.fixture
def server(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[LiveServer]:
    engine, _ = controlled_engine(tokenizer.vocab_size, budget=32)
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        yield server
    engine.assert_empty()


def chunks(server: LiveServer, path: str, **asked: Any) -> list[dict[str, Any]]:
    body = {"model": "hash", "max_tokens": 3, "stream": True, "ignore_eos": True, **ASKED[path], **asked}
    reply = httpx.post(f"{server.url}{path}", json=body, trust_env=False, timeout=None)  # noqa: S113
    *events, done = [event for event in reply.text.split("\n\n") if event]
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("path", ASKED)
def test_progress_is_reported_on_request(server: LiveServer, path: str) -> None:
    reported = chunks(server, path, return_progress=True, stream_options={"include_usage": True})
    progress = [chunk["prompt_progress"] for chunk in reported if "prompt_progress" in chunk]
    prompt = reported[-1]["usage"]["prompt_tokens"]
    assert [one["processed"] for one in progress] == [*range(32, prompt, 32), prompt]
    assert not any(chunk["choices"] for chunk in reported if "prompt_progress" in chunk)
    assert {(one["total"], one["cache"]) for one in progress} == {(prompt, 0)}
    times = [one["time_ms"] for one in progress]
    assert times == sorted(times)
    # The next request finds all full blocks of the prompt in the cache, and its first report counts them as cached.
    again = chunks(server, path, return_progress=True, stream_options={"include_usage": True}, n=2)
    assert again[-1]["timings"]["cache_n"] == prompt - 1 - (prompt - 1) % 16
    [once] = [chunk["prompt_progress"] for chunk in again if "prompt_progress" in chunk]
    assert (once["processed"], once["total"], once["cache"]) == (prompt, prompt, again[-1]["timings"]["cache_n"])
    assert not any("prompt_progress" in chunk for chunk in chunks(server, path, cache_salt="another"))


@pytest.mark.parametrize("path", ASKED)
def test_whole_reply_reports_its_timings(server: LiveServer, path: str) -> None:
    body = {"model": "hash", "max_tokens": 5, "ignore_eos": True, **ASKED[path], "n": 2}
    reply = httpx.post(f"{server.url}{path}", json=body, trust_env=False, timeout=None).json()  # noqa: S113
    timings, usage = reply["timings"], reply["usage"]
    assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (usage["prompt_tokens"], 0, 10)
    assert timings["prompt_ms"] > 0
    assert timings["predicted_ms"] > 0
    assert min(timings.values()) >= 0


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("reported", [{}, {"include_usage": True, "continuous_usage_stats": True}])
def test_interval_reduces_the_chunks_but_not_the_text(
    server: LiveServer, path: str, reported: Mapping[str, bool]
) -> None:
    asked: dict[str, Any] = {"max_tokens": 300, "seed": 4}
    every = texts(chunks(server, path, **asked))
    seldom = texts(chunks(server, path, **asked, stream_options={"interval_ms": 60_000, **reported}))
    assert "".join(seldom) == "".join(every)
    # A reply has the first chunk, then chunks with all tokens that were ready, at most MAX_BATCH tokens in each.
    assert len(seldom) <= 2 + 300 // MAX_BATCH < len(every)


def texts(reported: list[dict[str, Any]]) -> list[str]:
    parts = [
        choice.get("text") or choice.get("delta", {}).get("content") for one in reported for choice in one["choices"]
    ]
    return [part for part in parts if part]


def ended(first: float, total: float, queue: float, cache: CacheReport, completion: int) -> ReplyEnd:
    return ReplyEnd(FinishReason.LENGTH, None, 0, 100, cache, completion, first, total, queue_seconds=queue)


def test_timings_add_up_to_the_total() -> None:
    counts = TokenCounts()
    cache = CacheReport(TokenSources(device=10, host=20, disk=30, computed=40, restore_seconds=0.5))
    counts.add(ended(2.0, 6.0, 1.0, cache, 9), first_of_prompt=True)
    timings = timings_of(counts)
    assert (timings.queue_ms, timings.restore_ms, timings.prompt_ms, timings.predicted_ms) == (1000, 500, 500, 4000)
    assert (timings.cache_n, timings.prompt_n, timings.predicted_n) == (60, 40, 9)
    assert (timings.prompt_per_second, timings.prompt_per_token_ms) == (80, 12.5)
    assert (timings.predicted_per_second, timings.predicted_per_token_ms) == (2, 500)


def test_timings_of_two_replies_separate_queue_and_prefill() -> None:
    counts = TokenCounts()
    for first, queue in ((0.25, 0.0), (0.75, 0.5)):
        counts.add(ended(first, 1.0, queue, CacheReport(TokenSources(computed=40)), 9), first_of_prompt=True)
    timings = timings_of(counts)
    assert (timings.queue_ms, timings.prompt_ms, timings.predicted_ms) == (500, 250, 750)
