"""Beam search and best_of over HTTP, compared with a reference search and with the scores of the candidates."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.generation.conversation import Message
from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from engine.request import FinishReason
from engine.sampling_params import BeamParams, SamplingParams
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.test_disconnects import hang_up, send
from tests.support.hash_model import Seen, most_likely
from tests.support.processes import HANGING_SECONDS, until
from tests.support.reference_beam_search import reference_beam_search

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def http(hash_server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hash_server.url, timeout=HANGING_SECONDS) as http:
        yield http


def ask(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    given = {"prompt": PROMPT} if path == COMPLETION else {"messages": [{"role": "user", "content": PROMPT}]}
    response = http.post(path, json={"model": "hash", "max_tokens": 9, **given, **fields})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def prompt_ids(server: LiveServer, path: str, text: str = PROMPT) -> list[int]:
    if path == COMPLETION:
        return server.service.tokenizer.encode(text, parse_special=True)
    return list(server.call(server.service.encode([Message("user", text)])))


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def expected(server: LiveServer, path: str, beams: BeamParams, text: str = PROMPT) -> list[tuple[str, str, int]]:
    """Return (text, finish reason, tokens) of each result, best first."""
    tokenizer = server.service.tokenizer
    found = reference_beam_search(
        prompt_ids(server, path, text), beams, SamplingParams(), tokenizer.end_of_generation_ids, max_tokens=9
    )
    words = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
    return [
        (tokenizer.decode(tokens, continues_text=path == COMPLETION), words[finish], len(tokens))
        for _, tokens, finish in found[: beams.results]
    ]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("fields", "beams"),
    [
        ({}, BeamParams(1)),
        ({"n": 3}, BeamParams(3, 3)),
        ({"best_of": 4}, BeamParams(4, 1)),
        ({"n": 2, "best_of": 6, "length_penalty": 0.0, "early_stopping": True}, BeamParams(6, 2, 0.0, True)),
        ({"n": 2, "best_of": 4, "length_penalty": 2, "early_stopping": "never"}, BeamParams(4, 2, 2.0, "never")),
        ({"best_of": 3, "temperature": 1.7, "top_p": 0.5, "seed": 4}, BeamParams(3, 1)),
    ],
)
def test_choices_are_the_best_sequences(
    hash_server: LiveServer, http: httpx.Client, path: str, fields: dict[str, Any], beams: BeamParams
) -> None:
    reply = ask(http, path, use_beam_search=True, **fields)
    wanted = expected(hash_server, path, beams)
    assert [(text_of(it), it["finish_reason"]) for it in reply["choices"]] == [it[:2] for it in wanted]
    assert [it["index"] for it in reply["choices"]] == list(range(beams.results))
    assert reply["usage"]["prompt_tokens"] == len(prompt_ids(hash_server, path))
    assert reply["usage"]["completion_tokens"] == sum(it[2] for it in wanted)


def test_each_prompt_has_its_own_search(hash_server: LiveServer, http: httpx.Client) -> None:
    texts = ["One", "One", "Two little words"]
    reply = ask(http, COMPLETION, prompt=texts, use_beam_search=True, n=2, best_of=3)
    wanted = [it for text in texts for it in expected(hash_server, COMPLETION, BeamParams(3, 2), text)]
    assert [it["text"] for it in reply["choices"]] == [it[0] for it in wanted]
    assert reply["usage"]["prompt_tokens"] == sum(len(prompt_ids(hash_server, COMPLETION, text)) for text in texts)
    assert reply["usage"]["completion_tokens"] == sum(it[2] for it in wanted)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_stream_and_whole_reply_agree(http: httpx.Client, path: str) -> None:
    fields: dict[str, Any] = {"use_beam_search": True, "n": 2, "best_of": 4}
    whole = ask(http, path, **fields)
    given = {"prompt": PROMPT} if path == COMPLETION else {"messages": [{"role": "user", "content": PROMPT}]}
    asked = {"model": "hash", "max_tokens": 9, "stream": True, **given, **fields}
    texts = {0: "", 1: ""}
    with http.stream("POST", path, json=asked) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    assert list(texts.values()) == [text_of(choice) for choice in whole["choices"]]


def test_each_result_has_its_own_logprobs(http: httpx.Client) -> None:
    whole = ask(http, CHAT, use_beam_search=True, n=2, best_of=4, logprobs=True, top_logprobs=3)
    without = ask(http, CHAT, use_beam_search=True, n=2, best_of=4)
    for choice, other in zip(whole["choices"], without["choices"], strict=True):
        tokens = choice["logprobs"]["content"]
        assert choice["message"] == other["message"]
        assert other["logprobs"] is None
        assert [len(token["top_logprobs"]) for token in tokens] == [3] * len(tokens)
    means = [
        sum(token["logprob"] for token in choice["logprobs"]["content"]) / len(choice["logprobs"]["content"])
        for choice in whole["choices"]
    ]
    assert means == sorted(means, reverse=True)


def test_echo_repeats_the_prompt_before_each_result(hash_server: LiveServer, http: httpx.Client) -> None:
    reply = ask(http, COMPLETION, use_beam_search=True, n=2, echo=True, logprobs=1)
    wanted = expected(hash_server, COMPLETION, BeamParams(2, 2))
    assert [choice["text"] for choice in reply["choices"]] == [PROMPT + text for text, _, _ in wanted]


def test_stop_string_ends_a_result(hash_server: LiveServer, http: httpx.Client) -> None:
    whole = text_of(ask(http, COMPLETION, use_beam_search=True, best_of=3, ignore_eos=True)["choices"][0])
    stop = whole[4:7]
    cut = ask(http, COMPLETION, use_beam_search=True, best_of=3, ignore_eos=True, stop=stop)["choices"][0]
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


# -- best_of


def candidate(server: LiveServer, path: str, seed: int) -> tuple[float, str, int]:
    """Return (mean log-probability, text, tokens) of the hash model's reply with a seed."""
    tokenizer = server.service.tokenizer
    seen = Seen(server.engine.config.groups).after(*prompt_ids(server, path))
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < 9 and not tokenizer.end_of_generation_ids.intersection(tokens):
        ((token_id, logprob),) = most_likely(seed, *seen.slots(), count=1)
        tokens.append(token_id)
        logprobs.append(logprob)
        seen = seen.after(token_id)
    text = tokenizer.decode(tokens, continues_text=path == COMPLETION)
    return sum(logprobs) / len(logprobs), text, len(tokens)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(("n", "best_of"), [(1, 5), (3, 5), (5, 5)])
def test_best_candidates_are_returned(
    hash_server: LiveServer, http: httpx.Client, path: str, n: int, best_of: int
) -> None:
    reply = ask(http, path, n=n, best_of=best_of, seed=100, top_k=1)
    candidates = [candidate(hash_server, path, 100 + number) for number in range(best_of)]
    wanted = sorted(candidates, reverse=True)[:n] if n < best_of else candidates
    assert [text_of(it) for it in reply["choices"]] == [it[1] for it in wanted]
    assert all(it["logprobs"] is None for it in reply["choices"])
    assert reply["usage"]["prompt_tokens"] == len(prompt_ids(hash_server, path))
    assert reply["usage"]["completion_tokens"] == sum(it[2] for it in candidates)


def test_best_of_works_for_each_prompt_with_logprobs(hash_server: LiveServer, http: httpx.Client) -> None:
    reply = ask(http, COMPLETION, prompt=[PROMPT, "Two little words"], n=2, best_of=4, seed=7, top_k=1, logprobs=0)
    first = sorted((candidate(hash_server, COMPLETION, 7 + number) for number in range(4)), reverse=True)
    assert [it["text"] for it in reply["choices"][:2]] == [it[1] for it in first[:2]]
    for choices in (reply["choices"][:2], reply["choices"][2:]):
        means = [sum(it["logprobs"]["token_logprobs"]) / len(it["logprobs"]["tokens"]) for it in choices]
        assert means == sorted(means, reverse=True)
    assert means[0] < 0


def test_prompt_is_prefilled_once_for_all_candidates(hash_server: LiveServer, http: httpx.Client) -> None:
    prompt = [7] * 700
    before = hash_server.engine.state().counters.computed_tokens
    ask(http, COMPLETION, prompt=prompt, best_of=8, max_tokens=4, ignore_eos=True)
    assert hash_server.engine.state().counters.computed_tokens - before == len(prompt) + 8 * 3


# -- invalid requests


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("best_of", {"n": 3, "best_of": 2}),
        ("best_of", {"n": 3, "best_of": 2, "use_beam_search": True}),
        ("best_of", {"best_of": 2, "stream": True}),
        ("logit_bias", {"use_beam_search": True, "logit_bias": {"5": 1}}),
        ("dry_multiplier", {"use_beam_search": True, "dry_multiplier": 0.5}),
        ("presence_penalty", {"use_beam_search": True, "presence_penalty": 0.5}),
        ("frequency_penalty", {"use_beam_search": True, "frequency_penalty": 0.5}),
        ("repetition_penalty", {"use_beam_search": True, "repetition_penalty": 1.5}),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_error_names_conflicting_fields(http: httpx.Client, path: str, named: str, fields: dict[str, Any]) -> None:
    given = {"prompt": PROMPT} if path == COMPLETION else {"messages": [{"role": "user", "content": PROMPT}]}
    response = http.post(path, json={"model": "hash", **given, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, named)


def test_too_many_choices_are_refused(http: httpx.Client) -> None:
    response = http.post(COMPLETION, json={"model": "hash", "prompt": ["a"] * 100, "best_of": 3})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.fixture
def small(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[LiveServer]:
    engine, _ = controlled_engine(tokenizer.vocab_size, running=4, contexts=1)
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        yield server
        until(lambda: not engine.has_work)
    engine.assert_empty()


def test_search_larger_than_the_cache_is_refused_with_the_numbers(small: LiveServer) -> None:
    asked = {"model": "hash", "prompt": PROMPT, "use_beam_search": True}
    with httpx.Client(base_url=small.url, timeout=HANGING_SECONDS) as http:
        wide = http.post(COMPLETION, json={**asked, "n": 5}).json()["error"]
        assert wide["param"] == "best_of"
        assert wide["message"].startswith("best_of: a beam search of this width needs 5 slots, but there are 4")
        long = http.post(COMPLETION, json={**asked, "n": 4, "max_tokens": 1000}).json()["error"]
        assert (long["param"], long["code"]) == ("prompt", "context_length_exceeded")
        assert "width 4" in long["message"]


def test_disconnect_ends_the_search(small: LiveServer) -> None:
    body = json.dumps({"model": "hash", "prompt": PROMPT, "max_tokens": 400, "use_beam_search": True, "n": 4})
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    message = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    runner: Any = small.engine._runner

    async def leave() -> None:
        _, writer = await send(small, message)
        await asyncio.to_thread(small.step_until, steps, running=4, waiting=0)
        await hang_up(writer)

    with runner.held() as steps:
        asyncio.run(leave())
        until(lambda: not small.streams._live)
    until(lambda: not small.engine.has_work)
    assert small.streams.latencies.ends[FinishReason.ABORT] == 4
