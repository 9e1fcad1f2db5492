"""Chat completions through the real openai client, compared with exact output."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

from app.generation.conversation import Message
from tests.app.server.live_server import LiveServer
from tests.app.server.served_application import ServedApplication
from tests.support.hash_model import expected_output

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


def client(server: ServedApplication, *, strict: bool = True) -> openai.OpenAI:
    """An openai client that validates every field of a reply if `strict` is set."""
    url = f"{server.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, _strict_response_validation=strict)


def expected_text(server: LiveServer, question: str, count: int) -> str:
    """Return the hash model's reply of `count` tokens, which ignores end tokens."""
    prompt = server.call(server.service.encode([Message("user", question)]))
    return server.service.tokenizer.decode(expected_output(prompt, count))


def joined(chunks: Sequence[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_reply_equals_the_model_output(hash_server: LiveServer) -> None:
    with client(hash_server) as api:
        reply = api.chat.completions.create(
            model="hash", messages=QUESTION, max_tokens=40, extra_body={"ignore_eos": True}
        )
    assert reply.choices[0].message.content == expected_text(hash_server, "What is the capital of France?", 40)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "hash"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 40
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 40


def test_llama_vscode_request_without_model_or_limit_is_answered(hash_server: LiveServer) -> None:
    wanted = {"messages": [*QUESTION], "stream": False, "max_tokens": -1, "temperature": 0.8, "top_p": 0.95}
    answer = httpx.post(
        f"{hash_server.url}/v1/chat/completions", json={**wanted, "stop": ["e", "a"], "cache_prompt": True}
    )
    assert (answer.status_code, answer.json()["model"]) == (200, "hash")
    assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")


def test_null_model_means_the_served_model(hash_server: LiveServer) -> None:
    asked = {"model": None, "messages": [*QUESTION], "max_tokens": 2, "temperature": 3}
    answer = httpx.post(f"{hash_server.url}/v1/chat/completions", json=asked)
    assert (answer.status_code, answer.json()["model"]) == (200, "hash")


def test_paths_without_v1_give_the_same_reply(hash_server: LiveServer) -> None:
    with openai.OpenAI(base_url=hash_server.url, api_key="none", max_retries=0) as api:
        reply = api.chat.completions.create(model="hash", messages=QUESTION, max_tokens=4)
        assert [model.id for model in api.models.list()] == ["hash"]
    assert reply.usage is not None
    for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
        count = httpx.post(f"{hash_server.url}{path}", json={"messages": [*QUESTION]}, trust_env=False).json()
        assert count["input_tokens"] == reply.usage.prompt_tokens
    assert httpx.get(f"{hash_server.url}/v1/health", trust_env=False).json()["status"] == "ok"


@pytest.mark.parametrize("n", [1, 3])
def test_stream_and_whole_reply_agree(hash_server: LiveServer, n: int) -> None:
    asked: dict[str, Any] = {"model": "hash", "messages": QUESTION, "max_completion_tokens": 30, "n": n}
    with client(hash_server) as api:
        whole: ChatCompletion = api.chat.completions.create(**asked)
        with api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
            chunks = list(stream)
    assert len(whole.choices) == n
    for choice in whole.choices:
        assert choice.message.content == joined(chunks, choice.index) != ""
        finishes = [c.finish_reason for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert [reason for reason in finishes if reason] == [choice.finish_reason]
        assert finishes[-1] == choice.finish_reason
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    prompt = hash_server.call(hash_server.service.encode([Message("user", "What is the capital of France?")]))
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens == len(prompt)
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_starts_with_the_role_and_has_usage_only_on_request(hash_server: LiveServer) -> None:
    with client(hash_server) as api:
        chunks = list(api.chat.completions.create(model="hash", messages=QUESTION, max_tokens=3, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)


@pytest.mark.parametrize("others", [[], ["never said"]])
def test_stop_string_is_not_in_the_reply(hash_server: LiveServer, others: list[str]) -> None:
    text = expected_text(hash_server, "What is the capital of France?", 40)
    stop = text[60:64]
    with client(hash_server) as api:
        reply = api.chat.completions.create(
            model="hash",
            messages=QUESTION,
            max_tokens=40,
            stop=[*others, stop] if others else stop,
            extra_body={"ignore_eos": True},
        )
    assert reply.choices[0].message.content == text[: text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_32_concurrent_streams_equal_single_replies(hash_server: LiveServer) -> None:
    questions = [f"Question {number}: " + "why? " * (number % 7) for number in range(32)]

    async def ask(api: openai.AsyncOpenAI, question: str) -> str:
        stream = await api.chat.completions.create(
            model="hash",
            messages=[{"role": "user", "content": question}],
            max_tokens=30,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return joined([chunk async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{hash_server.url}/v1", api_key="none", max_retries=0) as api:
            return await asyncio.gather(*(ask(api, question) for question in questions))

    assert asyncio.run(ask_all()) == [expected_text(hash_server, question, 30) for question in questions]


def test_second_turn_finds_the_first_one_cached(hash_server: LiveServer) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "A long question. " * 20}]
    with client(hash_server) as api:
        first = api.chat.completions.create(model="hash", messages=messages, max_tokens=8)
        messages += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "And?"},
        ]
        second = api.chat.completions.create(model="hash", messages=messages, max_tokens=8)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens is not None
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens - 32


def test_content_parts_tool_results_and_unknown_fields_are_accepted(hash_server: LiveServer) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "How warm is it?"}], "name": "me"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "warmth", "arguments": '{"in": "C"}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "21"},
    ]
    with client(hash_server) as api:
        reply = api.chat.completions.create(
            model="hash",
            messages=messages,
            max_tokens=2,
            stop=[],
            user="me",
            tools=[],
            response_format={"type": "text"},
            logit_bias={"5": -100},
            extra_body={"a_field_of_tomorrow": {"deep": [1, 2]}, "top_k": -1, "temperature": None},
        )
    assert reply.usage is not None
    assert reply.usage.completion_tokens >= 1


def test_models_endpoint_lists_the_served_model(hash_server: LiveServer) -> None:
    with client(hash_server) as api:
        assert [model.id for model in api.models.list()] == ["hash"]
        assert api.models.retrieve("hash").object == "model"
        with pytest.raises(openai.NotFoundError) as missing:
            api.models.retrieve("org/other:Q4")
    assert missing.value.code == "model_not_found"


# -- the default model


@pytest.mark.parametrize("stream", [False, True])
def test_default_model_answers_a_question(smollm2_server: LiveServer, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "smollm2:135m", "messages": QUESTION, "temperature": 0, "max_tokens": 10}
    with client(smollm2_server) as api:
        if stream:
            text = joined(list(api.chat.completions.create(**asked, stream=True)))
        else:
            text = api.chat.completions.create(**asked).choices[0].message.content
    assert text is not None
    assert "Paris" in text


def test_logprobs_cover_every_token_of_the_reply(smollm2_server: LiveServer) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2:135m",
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 3,
    }
    with client(smollm2_server) as api:
        whole: ChatCompletion = api.chat.completions.create(**asked)
        chunks = list(api.chat.completions.create(**asked, stream=True))
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for token in logprobs.content:
        assert token.bytes is not None
        assert bytes(token.bytes).decode() == token.token
        assert [token.token, token.logprob] == [token.top_logprobs[0].token, token.top_logprobs[0].logprob]
        likelihoods = [alternative.logprob for alternative in token.top_logprobs]
        assert len(likelihoods) == 3
        assert likelihoods == sorted(likelihoods, reverse=True)
        assert likelihoods[0] <= 0
    assert "".join(token.token for token in logprobs.content) == whole.choices[0].message.content
    streamed = [choice.logprobs.content or [] for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [token for tokens in streamed for token in tokens] == logprobs.content


def test_choices_use_consecutive_seeds(smollm2_server: LiveServer) -> None:
    asked: dict[str, Any] = {"model": "smollm2:135m", "messages": QUESTION, "temperature": 2, "max_tokens": 4}
    with client(smollm2_server) as api:
        both = api.chat.completions.create(**asked, n=2, seed=7)
        second = api.chat.completions.create(**asked, seed=8)
    texts = [choice.message.content for choice in both.choices]
    assert texts[1] == second.choices[0].message.content
    assert texts[0] != texts[1]
