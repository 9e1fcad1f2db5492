"""Reply fields other than the text, as in vLLM and llama.cpp: ids, probabilities, counts, and times."""

import json
import re
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest

from app.generation.conversation import Message
from app.generation.events import TokenCounts
from app.generation.template import ChatTemplateRenderer
from app.server.dialects.openai import chat, completions, fields
from app.server.dialects.openai.reports import Identity
from app.text.tokenizer import Tokenizer
from engine.request import Origin
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.scripted_server import ScriptedServer
from tests.support.hash_model import expected_output

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
QUESTION = "What is the capital of France?"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": QUESTION}]},
    COMPLETION: {"prompt": QUESTION},
}


def ask(server: LiveServer, path: str, **asked: Any) -> dict[str, Any]:
    body = {"max_tokens": 5, "ignore_eos": True, **ASKED[path], **asked}
    answer = httpx.post(f"{server.url}{path}", json=body, trust_env=False, timeout=None)  # noqa: S113
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def stream(server: LiveServer, path: str, **asked: Any) -> list[dict[str, Any]]:
    body = {"max_tokens": 5, "ignore_eos": True, "stream": True, **ASKED[path], **asked}
    answer = httpx.post(f"{server.url}{path}", json=body, trust_env=False, timeout=None)  # noqa: S113
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def prompt_of(server: LiveServer, path: str) -> list[int]:
    if path == CHAT:
        return list(server.call(server.service.encode([Message("user", QUESTION)])))
    return server.service.tokenizer.encode(QUESTION)


def choices_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice.get("delta", {}).get("content") or ""
    return text


def whole_text(reply: dict[str, Any]) -> str:
    choice = reply["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@pytest.mark.parametrize("path", ASKED)
def test_token_ids_are_reported_on_request(hash_server: LiveServer, path: str) -> None:
    prompt = prompt_of(hash_server, path)
    expected = list(expected_output(tuple(prompt), 5))
    whole = ask(hash_server, path, return_token_ids=True, n=2)
    where = whole if path == CHAT else whole["choices"][1]
    assert where["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in whole["choices"]] == [expected, expected]
    chunks = stream(hash_server, path, return_token_ids=True)
    reporting = chunks if path == CHAT else choices_of(chunks)
    assert [one["prompt_token_ids"] for one in reporting if "prompt_token_ids" in one] == [prompt]
    assert [one for choice in choices_of(chunks) for one in choice.get("token_ids", ())] == expected
    plain = json.dumps(ask(hash_server, path))
    assert "token_ids" not in plain


@pytest.mark.parametrize("path", ASKED)
def test_prompt_logprobs_have_vllms_format(smollm2_server: LiveServer, path: str) -> None:
    prompt = prompt_of(smollm2_server, path)
    reply = ask(smollm2_server, path, prompt_logprobs=2, max_tokens=1, temperature=0, n=2)
    reported = reply["prompt_logprobs"] if path == CHAT else reply["choices"][0]["prompt_logprobs"]
    assert reported[0] is None
    assert len(reported) == len(prompt)
    for token_id, likely in zip(prompt[1:], reported[1:], strict=True):
        assert 2 <= len(likely) <= 3
        assert all(one["logprob"] <= 0 for one in likely.values())
        assert likely[str(token_id)]["decoded_token"] == smollm2_server.service.tokenizer.decode(
            [token_id], continues_text=True, show_control=True
        )
        ranks = [one["rank"] for one in likely.values() if one["rank"] is not None]
        assert sorted(ranks) == [1, 2]
    assert "prompt_logprobs" not in json.dumps(ask(smollm2_server, path, max_tokens=1))


def test_echoed_prompt_may_have_a_different_number_of_alternatives(smollm2_server: LiveServer) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    reply = ask(smollm2_server, COMPLETION, prompt_logprobs=3, **asked)["choices"][0]
    plain = ask(smollm2_server, COMPLETION, **asked)["choices"][0]
    assert reply["logprobs"]["token_logprobs"] == plain["logprobs"]["token_logprobs"]
    assert reply["logprobs"]["tokens"] == plain["logprobs"]["tokens"]
    assert len(reply["prompt_logprobs"][1]) >= 3


@pytest.mark.parametrize("path", ASKED)
def test_logprobs_can_name_tokens_by_id(hash_server: LiveServer, path: str) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    reply = ask(hash_server, path, return_tokens_as_token_ids=True, **asked)
    expected = [f"token_id:{one}" for one in expected_output(tuple(prompt_of(hash_server, path)), 5)]
    logprobs = reply["choices"][0]["logprobs"]
    if path == CHAT:
        assert [one["token"] for one in logprobs["content"]] == expected
        assert all(one["top_logprobs"][0]["token"].startswith("token_id:") for one in logprobs["content"])
    else:
        assert logprobs["tokens"] == expected
        assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)


@pytest.mark.parametrize("path", ASKED)
def test_usage_is_in_each_chunk_on_request(hash_server: LiveServer, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stream(hash_server, path, stream_options=options, max_tokens=20)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
    prompt = len(prompt_of(hash_server, path))
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 20
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks if "usage" in chunk} == {prompt}
    assert chunks[-1]["usage"]["total_tokens"] == prompt + 20
    alone = stream(hash_server, path, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in alone)


@pytest.mark.parametrize("path", ASKED)
def test_timings_are_in_each_chunk_on_request(hash_server: LiveServer, path: str) -> None:
    chunks = stream(hash_server, path, timings_per_token=True, max_tokens=20)
    timings = [chunk["timings"] for chunk in chunks if "timings" in chunk]
    assert len(timings) == len(chunks) - (path == CHAT)  # the chunk with the role has no timings
    assert [one["predicted_n"] for one in timings] == sorted(one["predicted_n"] for one in timings)
    assert timings[-1]["predicted_n"] == 20
    prompt = len(prompt_of(hash_server, path))
    assert {one["prompt_n"] + one["cache_n"] for one in timings} == {prompt}
    assert "prompt_progress" not in json.dumps(chunks)


@pytest.mark.parametrize("path", ASKED)
def test_reply_has_the_version_and_the_requested_id(hash_server: LiveServer, path: str) -> None:
    reply = ask(hash_server, path, request_id="mine-1")
    version = httpx.get(f"{hash_server.url}/version", trust_env=False).json()["version"]
    assert reply["system_fingerprint"] == f"inglenook-{version}"
    assert reply["id"] in ("chatcmpl-mine-1", "cmpl-mine-1")
    chunks = stream(hash_server, path)
    assert {chunk["system_fingerprint"] for chunk in chunks} == {reply["system_fingerprint"]}


@pytest.fixture
def slow(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[tuple[LiveServer, threading.Semaphore]]:
    """A server whose prompts take several steps, each of which waits for a release."""
    engine, runner = controlled_engine(tokenizer.vocab_size, budget=32)
    with LiveServer("hash", engine, tokenizer, renderer) as server, runner.held() as steps:
        yield server, steps
        steps.release(1000)
    engine.assert_empty()


@pytest.mark.parametrize("path", ASKED)
def test_no_choice_is_sent_before_the_first_token(slow: tuple[LiveServer, threading.Semaphore], path: str) -> None:
    server, steps = slow
    long, counts, identity = "word " * 200, TokenCounts(), Identity.new("id", "m")
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": long}]} if path == CHAT else {"prompt": long}
    body = json.dumps({**asked, "max_tokens": 2, "stream": True, "ignore_eos": True}).encode()
    chunks: AsyncGenerator[list[Any]] = (
        chat.chunks(server.service, fields.CHAT.decode(body), identity, Origin(), counts)
        if path == CHAT
        else completions.chunks(server.service, fields.COMPLETION.decode(body), identity, Origin(), counts)
    )

    async def batches() -> tuple[list[Any], str, list[list[Any]]]:
        steps.release(2)
        first, waiting = await anext(chunks), counts.status
        steps.release(1000)
        return first, waiting, [batch async for batch in chunks]

    first, waiting, rest = server.call(batches())
    assert first == []
    assert re.fullmatch(r"prefill (32|64) of 2\d\d", waiting)
    beginning, *reported = (chunk.choices[0] for chunk in rest[0])
    if path == CHAT:
        assert (beginning.delta.role, beginning.delta.content) == ("assistant", "")
    assert (reported[0].delta.content if path == CHAT else beginning.text) != ""
    assert counts.status == "decode"


def test_zero_max_tokens_only_echoes_the_prompt(smollm2_server: LiveServer) -> None:
    reply = ask(smollm2_server, COMPLETION, max_tokens=0, echo=True, logprobs=0)
    choice, prompt = reply["choices"][0], prompt_of(smollm2_server, COMPLETION)
    assert choice["text"] == QUESTION
    assert len(choice["logprobs"]["tokens"]) == len(prompt)
    assert reply["usage"]["completion_tokens"] == 0
    assert ask(smollm2_server, COMPLETION, n_predict=0, max_tokens=None)["choices"][0]["text"] == ""


def test_control_tokens_are_shown_on_request(scripted_server: ScriptedServer) -> None:
    scripted_server.says("a<|im_start|>b")
    several: list[tuple[dict[str, Any], str]] = [({}, "ab"), ({"skip_special_tokens": False}, "a<|im_start|>b")]
    for asked, expected in several:
        text = ask(scripted_server, COMPLETION, max_tokens=20, ignore_eos=False, **asked)["choices"][0]["text"]
        assert text == expected


def test_echo_repeats_control_tokens(smollm2_server: LiveServer) -> None:
    prompt = "<|im_start|>user\nHi<|im_end|>"
    ids = smollm2_server.service.tokenizer.encode(prompt, parse_special=True)
    for given in (prompt, ids):
        choice = ask(smollm2_server, COMPLETION, prompt=given, echo=True, logprobs=0, max_tokens=2)["choices"][0]
        assert choice["text"].startswith(prompt)
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        for token, offset in zip(tokens[: len(ids)], offsets, strict=False):
            assert choice["text"][offset:].startswith(token)


def test_stop_string_is_included_on_request(hash_server: LiveServer) -> None:
    text = ask(hash_server, COMPLETION, max_tokens=20)["choices"][0]["text"]
    stop = text[10:14]
    reply = ask(hash_server, COMPLETION, max_tokens=20, stop=stop, include_stop_str_in_output=True)
    assert reply["choices"][0]["text"] == text[: text.index(stop) + 4]


@pytest.mark.parametrize("path", ASKED)
def test_allowed_tokens_and_bad_words_are_enforced(smollm2_server: LiveServer, path: str) -> None:
    tokenizer = smollm2_server.service.tokenizer
    allowed = [tokenizer.encode(text)[0] for text in ("A", "B", "C")]
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}
    reply = ask(smollm2_server, path, allowed_token_ids=allowed, **asked)
    assert set(reply["choices"][0]["token_ids"]) <= set(allowed)
    word = whole_text(ask(smollm2_server, path, **asked)).split()[0]
    assert word not in whole_text(ask(smollm2_server, path, **asked, bad_words=[word]))


def test_reasoning_is_left_out_on_request(scripted_server: ScriptedServer) -> None:
    scripted_server.says("<think>\nHm.\n</think>\n\nHello")
    for asked in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        message = ask(scripted_server, CHAT, max_tokens=50, ignore_eos=False, **asked)["choices"][0]["message"]
        assert (message["content"], "reasoning" in message) == ("Hello", False)
    assert ask(scripted_server, CHAT, max_tokens=50, ignore_eos=False)["choices"][0]["message"]["reasoning"] == "Hm."


@pytest.mark.parametrize("path", ASKED)
def test_replies_follow_llama_cpp_grammars(smollm2_server: LiveServer, path: str) -> None:
    for asked in ({"grammar": 'root ::= "zebra" "!"'}, {"json_schema": {"const": "zebra!"}}):
        reply = ask(smollm2_server, path, **asked, max_tokens=50, ignore_eos=False)
        assert whole_text(reply).strip('"') == "zebra!"


def test_request_chooses_the_end_of_the_prompt(hash_server: LiveServer) -> None:
    messages = [{"role": "critic", "content": "Hm."}, {"role": "assistant", "content": "Paris is"}]
    several: list[tuple[dict[str, Any], str]] = [
        ({}, "<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "Paris is<|im_end|>\n"),
        ({"continue_final_message": True}, "<|im_start|>assistant\nParis is"),
    ]
    for asked, end in several:
        ids = ask(hash_server, CHAT, messages=messages, return_token_ids=True, **asked)["prompt_token_ids"]
        prompt = hash_server.service.tokenizer.decode(ids, show_control=True)
        assert "<|im_start|>critic\nHm.<|im_end|>" in prompt
        assert prompt.endswith(end)
