"""GET /metrics returns correct values in every state of the engine."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.generation.conversation import Message
from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from engine.counters import Counters, EngineState
from engine.request import TokenSources
from tests.app.server.dialects.openai.test_chat import expected_text
from tests.app.server.live_server import Clock, ControlledRunner, LiveServer, controlled_engine
from tests.app.server.test_bad_requests import CHAT, COMPLETION
from tests.support.processes import until

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
Stack = tuple[LiveServer, ControlledRunner, Clock]

# vLLM's metrics without its prefix. Dashboards and autoscalers rely on these names.
KNOWN = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
}


@pytest.fixture
def stack(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[Stack]:
    """A separate server that runs at most two requests, and its runner and clock."""
    engine, runner = controlled_engine(tokenizer.vocab_size, running=2)
    clock = Clock()
    with LiveServer("hash", engine, tokenizer, renderer, clock) as server:
        yield server, runner, clock
    engine.assert_empty()


def scraped(server: LiveServer) -> Samples:
    response = httpx.get(f"{server.url}/metrics", timeout=60)
    assert response.status_code == 200, response.text
    families = text_string_to_metric_families(response.text)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def figure(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"ingle:{name}", frozenset({"model_name": "hash", **labels}.items())]


def ask(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    """Return the JSON of a whole reply, by default of 6 tokens to the prompt `Hi`."""
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    body = {"model": "hash", "max_tokens": 6, "ignore_eos": True, **prompt, **fields}
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_vllm_metrics_have_the_expected_types(hash_server: LiveServer) -> None:
    response = httpx.get(f"{hash_server.url}/metrics")
    types = {family.name: family.type for family in text_string_to_metric_families(response.text)}
    assert {f"ingle:{name}": kind for name, kind in KNOWN.items()}.items() <= types.items()
    assert all(name.startswith("ingle:") for name in types)


@pytest.mark.parametrize(
    "accepted", ["", "*/*", "application/openmetrics-text; version=1.0.0", "text/plain;version=1.0.0"]
)
def test_metric_names_do_not_depend_on_the_accept_header(hash_server: LiveServer, accepted: str) -> None:
    response = httpx.get(f"{hash_server.url}/metrics", headers={"accept": accepted})
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\ningle:num_requests_running{" in response.text


def test_metrics_are_not_registered_globally(hash_server: LiveServer) -> None:
    scraped(hash_server)
    assert not [family.name for family in prometheus_client.REGISTRY.collect() if family.name.startswith("ingle")]


def test_metrics_count_several_requests(stack: Stack) -> None:
    server, runner, _ = stack
    content = "one two three four five six seven eight nine ten " * 5
    messages = [{"role": "user", "content": content}]
    prompt = len(server.call(server.service.encode([Message("user", content)])))
    # only full blocks are cached, and the last token is always computed
    cached = prompt // 16 * 16 if prompt % 16 else prompt - 16
    for service_class in ("interactive", "interactive", "background"):
        ask(server, CHAT, messages=messages, service_class=service_class)
    stop = expected_text(server, content, 4)[-2:]
    with runner.held() as steps:
        steps.release(40)  # the reply must not reach its longest length before it is stopped
        ask(server, CHAT, messages=messages, max_tokens=900, stop=stop)
    until(lambda: not server.engine.has_work)
    samples = scraped(server)
    for name, value in {
        "prompt_tokens_total": 4 * prompt,
        "prefix_cache_queries_total": 4 * prompt,
        "prefix_cache_hits_total": 3 * cached,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "healthy": 1,
        "failed_steps_total": 0,
        "num_preemptions_total": 0,
    }.items():
        assert figure(samples, name) == value, name
    assert figure(samples, "generation_tokens_total") >= 3 * 6 + 2
    assert figure(samples, "tokens_by_source_total", source="device") == 3 * cached
    computed = figure(samples, "tokens_by_source_total", source="computed")
    assert computed >= 4 * prompt - 3 * cached + 3 * 5
    ends = {
        reason: figure(samples, "request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert ends == {"stop": 1, "length": 3, "abort": 0, "error": 0}
    for service_class, replies in (("interactive", 2), ("normal", 1), ("background", 1)):
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert figure(samples, f"{name}_count", service_class=service_class) == replies
    assert figure(samples, "inter_token_latency_seconds_count", service_class="interactive") == 2 * 5


def test_histograms_are_cumulative_and_in_seconds(stack: Stack) -> None:
    server, runner, clock = stack
    with ThreadPoolExecutor(1) as clients, runner.held() as steps:
        asked = clients.submit(ask, server, COMPLETION, max_tokens=2)
        until(lambda: runner.plans == 1)
        clock.seconds += 3
        steps.release()
        until(lambda: runner.plans == 2)
        server.call(settled())  # the server has handled the first token's event
        clock.seconds += 0.04
        steps.release()
        asked.result()
    samples = scraped(server)
    for name, seconds in (
        ("time_to_first_token_seconds", 3.0),
        ("inter_token_latency_seconds", 0.04),
        ("e2e_request_latency_seconds", 3.04),
    ):
        buckets = {
            dict(labels)["le"]: value
            for (found, labels), value in samples.items()
            if found == f"ingle:{name}_bucket" and ("service_class", "normal") in labels
        }
        assert buckets.pop("+Inf") == 1
        assert all(value == (float(bound) >= seconds) for bound, value in buckets.items())
        assert 0 < sum(buckets.values()) < len(buckets)
        assert figure(samples, f"{name}_sum", service_class="normal") == pytest.approx(seconds)


async def settled() -> None:
    """Return on the server's event loop, after the callbacks that were scheduled before."""


def test_running_and_waiting_requests_are_counted_by_class(stack: Stack) -> None:
    server, runner, _ = stack
    with ThreadPoolExecutor(5) as clients, runner.held() as steps:
        asked = [
            clients.submit(ask, server, CHAT, max_tokens=300, service_class=name) for name in ("interactive", "normal")
        ]
        server.step_until(steps, running=2, waiting=0)
        asked += [clients.submit(ask, server, CHAT, max_tokens=300, service_class="background") for _ in range(3)]
        server.step_until(steps, running=2, waiting=3)
        samples = scraped(server)
        health = httpx.get(f"{server.url}/health").json()
        steps.release(100_000)
        for one in asked:
            one.result()
    running = {"interactive": 1, "normal": 1, "background": 0}
    assert health["running_by_class"] == running
    assert (health["running"], figure(samples, "num_requests_running")) == (2, 2)
    for name, count in running.items():
        assert figure(samples, "num_requests_running_by_class", service_class=name) == count
    waiting = {"interactive": 0, "normal": 0, "background": 3}
    assert health["waiting_by_class"] == waiting
    for name, count in waiting.items():
        assert figure(samples, "num_requests_waiting_by_class", service_class=name) == count
    assert figure(samples, "num_requests_waiting") == health["waiting"] == 3
    assert figure(samples, "kv_blocks_held") == health["kv_blocks_held"] > 0
    assert figure(samples, "kv_cache_usage_perc") == health["kv_blocks_held"] / health["kv_blocks"]


def test_choices_in_prefill_are_counted_by_class(stack: Stack) -> None:
    """One step prefills the prompt of all choices. Two of them have slots, and one waits."""
    server, runner, _ = stack
    with ThreadPoolExecutor(1) as clients, runner.held() as steps:
        asked = clients.submit(ask, server, CHAT, n=3, service_class="background")
        until(lambda: runner.plans == 1)
        health = httpx.get(f"{server.url}/health").json()
        steps.release(1000)
        asked.result()
    assert (health["running"], health["running_by_class"]["background"]) == (2, 2)
    assert (health["waiting"], health["waiting_by_class"]["background"]) == (1, 1)


def test_every_value_of_the_engine_state_is_exported(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers differ, so that swapped values are detected."""
    server, _, _ = stack
    counters = Counters(
        prompt_tokens=101,
        prompts=TokenSources(device=60, host=13, disk=29),
        computed_tokens=103,
        generated_tokens=104,
        swapped_out=105,
        recomputed=107,
        failed_steps=111,
        disk_read_bytes=113,
        disk_written_bytes=114,
        disk_misses=115,
    )
    state = EngineState(
        running=2,
        waiting=(3, 4, 5),
        swapped=6,
        kv_blocks=80,
        kv_blocks_held=20,
        kv_blocks_cached=31,
        host_blocks=33,
        host_blocks_used=34,
        counters=counters,
        failed_captures=116,
    )
    monkeypatch.setattr(server.engine, "state", lambda: state)
    samples = scraped(server)
    reported = {
        "num_requests_running": 2,
        "num_requests_waiting": 12,
        "num_requests_swapped": 6,
        "kv_cache_usage_perc": 0.25,
        "kv_blocks": 80,
        "kv_blocks_held": 20,
        "kv_blocks_cached": 31,
        "host_pool_blocks": 33,
        "host_pool_blocks_used": 34,
        "prompt_tokens_total": 101,
        "generation_tokens_total": 104,
        "prefix_cache_queries_total": 101,
        "prefix_cache_hits_total": 102,
        "num_preemptions_total": 212,
        "failed_steps_total": 111,
        "failed_graph_captures_total": 116,
        "disk_read_bytes_total": 113,
        "disk_written_bytes_total": 114,
        "disk_misses_total": 115,
    }
    assert {name: figure(samples, name) for name in reported} == reported
    assert figure(samples, "num_preemptions_by_kind_total", kind="swap") == 105
    assert figure(samples, "num_preemptions_by_kind_total", kind="recompute") == 107
    for source, tokens in {"device": 102 - 13 - 29, "host": 13, "disk": 29, "computed": 103}.items():
        assert figure(samples, "tokens_by_source_total", source=source) == tokens
    for name, count in zip(("interactive", "normal", "background"), state.waiting, strict=True):
        assert figure(samples, "num_requests_waiting_by_class", service_class=name) == count
    monkeypatch.setattr(server.engine, "state", lambda: replace(state, kv_blocks=0, kv_blocks_held=0))
    assert figure(scraped(server), "kv_cache_usage_perc") == 0


def test_model_name_with_quotes_is_escaped(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    name = 'a "model"\\with\nall of it'
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer(name, engine, tokenizer, renderer) as server:
        models = {value for _, labels in scraped(server) for label, value in labels if label == "model_name"}
    assert models == {name}


def test_failed_steps_and_disconnects_are_counted(stack: Stack) -> None:
    server, runner, _ = stack
    runner.failures = 1
    body = {"model": "hash", "prompt": "Hi", "stream": True, "max_tokens": 1500, "ignore_eos": True}
    assert httpx.post(server.url + COMPLETION, json=body, timeout=60).status_code == 500
    with runner.held() as steps:  # hold the steps, so that the request cannot end before the client disconnects
        steps.release(5)
        with httpx.stream("POST", server.url + COMPLETION, json=body, timeout=60) as response:
            next(response.iter_lines())
        until(lambda: not server.streams._live)
    until(lambda: not server.engine.has_work)
    samples = scraped(server)
    assert figure(samples, "failed_steps_total") == 1
    assert figure(samples, "request_success_total", finished_reason="error") == 1
    assert figure(samples, "request_success_total", finished_reason="abort") == 1
    assert figure(samples, "e2e_request_latency_seconds_count", service_class="normal") == 0


def test_scrape_works_while_the_engine_is_stuck_or_dead(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    server, runner, clock = stack
    with ThreadPoolExecutor(1) as clients, runner.held() as steps:
        asked = clients.submit(ask, server, CHAT)
        until(lambda: runner.plans == 1)
        clock.seconds += 60
        samples = scraped(server)
        assert figure(samples, "healthy") == 0
        assert figure(samples, "num_requests_running") == 1
        steps.release(1000)
        asked.result()
    until(lambda: figure(scraped(server), "healthy") == 1)
    monkeypatch.setattr(server.engine, "step", lambda: 1 / 0)
    assert httpx.post(server.url + COMPLETION, json={"model": "hash", "prompt": "Hi"}, timeout=60).status_code == 500
    samples = scraped(server)
    assert figure(samples, "healthy") == 0
    assert figure(samples, "request_success_total", finished_reason="error") == 1
