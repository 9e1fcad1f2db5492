"""Prompts through the real ollama client: answered, gone on with, and filled in the middle; exactly known output."""

from typing import Any

import httpx
import ollama
import pytest

from app.chat.messages import Message
from tests.app.server.dialects.ollama.real_client import client
from tests.app.server.dialects.openai.test_chat import expected_text
from tests.app.server.live_server import LiveServer
from tests.hash_model import expected_output


def generate(server: LiveServer, prompt: str, length: int = 30, **asked: Any) -> Any:
    options = {"num_predict": length, "top_k": 0}  # the hash model's one answer, and not one of many
    with client(server) as api:
        reply = api.generate(server.service.name, prompt, options=options, **asked)
        return list(reply) if asked.get("stream") else reply


def continued(server: LiveServer, ids: list[int], count: int) -> str:
    return server.service.tokenizer.decode(expected_output(tuple(ids), count), continues_text=True)


def test_a_prompt_is_a_turn_of_a_chat_streamed_or_whole(hash_server: LiveServer) -> None:
    whole = generate(hash_server, "Say something")
    parts = generate(hash_server, "Say something", stream=True)
    assert whole.response == "".join(part.response for part in parts)
    assert expected_text(hash_server, "Say something", 30).startswith(whole.response)
    assert (parts[-1].eval_count, parts[-1].done_reason) == (whole.eval_count, whole.done_reason)


def test_a_system_message_goes_first(hash_server: LiveServer) -> None:
    encoded = hash_server.service.encode([Message("system", "Be brief."), Message("user", "Hi")])
    assert generate(hash_server, "Hi", 1, system="Be brief.").prompt_eval_count == len(hash_server.call(encoded))


def test_a_raw_prompt_stands_as_it_is(hash_server: LiveServer) -> None:
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = hash_server.service.tokenizer.encode(prompt, parse_special=True)
    reply = generate(hash_server, prompt, 20, raw=True)
    assert continued(hash_server, ids, 20).startswith(reply.response)
    assert reply.prompt_eval_count == len(ids)


def test_what_stands_before_a_suffix_is_asked_for_with_the_models_own_tokens(code_server: LiveServer) -> None:
    tokenizer = code_server.service.tokenizer
    marks = [tokenizer.control_tokens[f"<fim_{name}>"] for name in ("prefix", "suffix", "middle")]
    ids = [marks[0], *tokenizer.encode("a = "), marks[1], *tokenizer.encode("\nprint(a)"), marks[2]]
    reply = generate(code_server, "a = ", 9, suffix="\nprint(a)")
    assert reply.response == continued(code_server, ids, 9)
    with client(code_server) as api:
        shown = api.show("starcoder")
    assert "insert" in (shown.capabilities or ())
    assert ".Suffix" in (shown.template or "")  # by which some clients know


def test_a_prompt_that_is_only_read_is_found_later(hash_server: LiveServer) -> None:
    prompt = "A text that nobody else has sent so far, and so it is computed. " * 8
    read = generate(hash_server, prompt, 0, raw=True)
    assert (read.response, read.eval_count, read.done_reason) == ("", 0, "length")
    asked = {"model": "hash", "prompt": prompt, "max_tokens": 1}
    usage = httpx.post(f"{hash_server.url}/v1/completions", json=asked).json()["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] <= 16


def test_without_a_prompt_the_model_is_there(hash_server: LiveServer) -> None:
    reply = generate(hash_server, "", keep_alive=0)
    assert (reply.done, reply.done_reason, reply.response) == (True, "load", "")


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"images": [b"a"]}, "images: this version reads text only"),
        ({"template": "{{ .Prompt }}"}, "template: the model's own is used"),
        ({"context": [1, 2]}, "context: this version does not go on from ids"),
        ({"suffix": "b"}, "suffix: hash has no tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(hash_server: LiveServer, asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(ollama.ResponseError, match=problem) as refused:
        generate(hash_server, "a", **asked)
    assert refused.value.status_code == 400
