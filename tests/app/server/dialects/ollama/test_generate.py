"""Ollama's generate endpoint through the real client: exact replies to prompts, continuations, and infill."""

import json
from typing import Any

import httpx
import ollama
import pytest

from app.generation.conversation import Message
from tests.app.server.dialects.ollama.real_client import client
from tests.app.server.dialects.openai.test_chat import expected_text
from tests.app.server.live_server import LiveServer
from tests.support.hash_model import expected_output


def generate(server: LiveServer, prompt: str, length: int = 30, **asked: Any) -> Any:
    # top_k 0 disables the limit, so that the hash model's output is exact
    options = {"num_predict": length, "top_k": 0}
    with client(server) as api:
        reply = api.generate(server.service.name, prompt, options=options, **asked)
        return list(reply) if asked.get("stream") else reply


def continued(server: LiveServer, ids: list[int], count: int) -> str:
    return server.service.tokenizer.decode(expected_output(tuple(ids), count), continues_text=True)


def test_prompt_is_answered_as_a_chat_streamed_and_whole(hash_server: LiveServer) -> None:
    whole = generate(hash_server, "Say something")
    parts = generate(hash_server, "Say something", stream=True)
    assert whole.response == "".join(part.response for part in parts)
    assert expected_text(hash_server, "Say something", 30).startswith(whole.response)
    assert (parts[-1].eval_count, parts[-1].done_reason) == (whole.eval_count, whole.done_reason)


def test_system_message_comes_first(hash_server: LiveServer) -> None:
    encoded = hash_server.service.encode([Message("system", "Be brief."), Message("user", "Hi")])
    assert generate(hash_server, "Hi", 1, system="Be brief.").prompt_eval_count == len(hash_server.call(encoded))


def test_raw_prompt_is_not_changed(hash_server: LiveServer) -> None:
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = hash_server.service.tokenizer.encode(prompt, parse_special=True)
    reply = generate(hash_server, prompt, 20, raw=True)
    assert continued(hash_server, ids, 20).startswith(reply.response)
    assert reply.prompt_eval_count == len(ids)


def test_suffix_uses_the_infill_tokens_of_the_model(code_server: LiveServer) -> None:
    tokenizer = code_server.service.tokenizer
    marks = [tokenizer.control_tokens[f"<fim_{name}>"] for name in ("prefix", "suffix", "middle")]
    ids = [marks[0], *tokenizer.encode("a = "), marks[1], *tokenizer.encode("\nprint(a)"), marks[2]]
    reply = generate(code_server, "a = ", 9, suffix="\nprint(a)")
    assert reply.response == continued(code_server, ids, 9)
    with client(code_server) as api:
        shown = api.show("starcoder")
    assert "insert" in (shown.capabilities or ())
    assert ".Suffix" in (shown.template or "")  # some clients check the template for ".Suffix"


def test_prefilled_prompt_is_cached(hash_server: LiveServer) -> None:
    prompt = "A text that nobody else has sent so far, and so it is computed. " * 8
    read = generate(hash_server, prompt, 0, raw=True)
    assert (read.response, read.eval_count, read.done_reason) == ("", 0, "length")
    asked = {"model": "hash", "prompt": prompt, "max_tokens": 1}
    usage = httpx.post(f"{hash_server.url}/v1/completions", json=asked).json()["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] <= 16


def test_prompt_continues_the_context_of_an_earlier_reply(hash_server: LiveServer) -> None:
    tokenizer = hash_server.service.tokenizer
    first = generate(hash_server, "Say something", 12)
    [question] = [hash_server.call(hash_server.service.encode([Message("user", "Say something")]))]
    assert list(first.context[: len(question)]) == list(question)
    assert tokenizer.decode(first.context[len(question) :]) == first.response
    second = generate(hash_server, "And more", 12, context=first.context, stream=True)[-1]
    turn = "<|im_end|>\n<|im_start|>user\nAnd more<|im_end|>\n<|im_start|>assistant\n"
    expected = [*first.context, *tokenizer.encode(turn, parse_special=True)]
    assert list(second.context[: len(expected)]) == expected
    assert second.prompt_eval_count == len(expected)


def test_context_excludes_end_token_and_stop_string(hash_server: LiveServer) -> None:
    tokenizer = hash_server.service.tokenizer
    question = hash_server.call(hash_server.service.encode([Message("user", "Say something")]))
    said = expected_text(hash_server, "Say something", 30)
    stop = said[8:12]
    with client(hash_server) as api:
        options = {"num_predict": 30, "top_k": 0, "stop": [stop]}
        cut = api.generate("hash", "Say something", options=options)
    assert cut.response == said.partition(stop)[0]
    assert cut.response.startswith(tokenizer.decode((cut.context or [])[len(question) :]))
    assert not tokenizer.end_of_generation_ids.intersection(generate(hash_server, "Hi", 400).context[-1:])


def test_system_message_comes_after_the_context(hash_server: LiveServer) -> None:
    first = generate(hash_server, "Say something", 5)
    second = generate(hash_server, "And more", 1, context=first.context, system="Be brief.")
    text = hash_server.service.tokenizer.encode("<|im_start|>system\nBe brief.<|im_end|>\n", parse_special=True)
    plain = generate(hash_server, "And more", 1, context=first.context)
    assert second.prompt_eval_count == plain.prompt_eval_count + len(text)


def test_raw_prompt_and_suffix_return_no_context(code_server: LiveServer, hash_server: LiveServer) -> None:
    assert generate(hash_server, "Hi", 3, raw=True).context is None
    assert generate(code_server, "a = ", 3, suffix="\n").context is None


def test_options_of_ollamas_documents_are_accepted(hash_server: LiveServer) -> None:
    options: dict[str, Any] = {
        "num_keep": 5,
        "seed": 42,
        "num_predict": 10,
        "draft_num_predict": 4,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.0,
        "typical_p": 0.7,
        "repeat_last_n": 33,
        "temperature": 0.8,
        "repeat_penalty": 1.2,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.0,
        "mirostat": 1,
        "mirostat_tau": 0.8,
        "mirostat_eta": 0.6,
        "penalize_newline": True,
        "stop": ["\n", "user:"],
        "numa": False,
        "num_ctx": 1024,
        "num_batch": 2,
        "num_gpu": 1,
        "main_gpu": 0,
        "use_mmap": True,
        "num_thread": 8,
    }
    body = {"model": "hash", "prompt": "Why is the sky blue?", "stream": False, "options": options}
    reply = httpx.post(f"{hash_server.url}/api/generate", content=json.dumps(body), trust_env=False, timeout=60).json()
    assert reply["done"]
    assert reply["total_duration"] >= reply["load_duration"] + reply["prompt_eval_duration"]


def test_request_without_a_prompt_is_answered_as_a_load(hash_server: LiveServer) -> None:
    reply = generate(hash_server, "", keep_alive=-1)
    assert (reply.done, reply.done_reason, reply.response) == (True, "load", "")


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"images": [b"a"], "raw": True}, "images: this version reads text only"),
        ({"template": "{{ .Prompt }}"}, "template: it is not supported. Send the whole prompt with raw"),
        ({"context": [10**9]}, "context: token id 1000000000 is not in the vocabulary"),
        ({"context": [1, 2], "raw": True}, "context: it continues a chat"),
        ({"system": "Be brief.", "raw": True}, "system: a raw prompt has no system message"),
        ({"suffix": "b"}, "suffix: hash does not support infilling"),
    ],
)
def test_error_names_unsupported_values(hash_server: LiveServer, asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(ollama.ResponseError, match=problem) as refused:
        generate(hash_server, "a", **asked)
    assert refused.value.status_code == 400
