"""Tokenize, detokenize, and template endpoints of llama.cpp's server and of vLLM."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.generation.conversation import Message
from tests.app.server.live_server import LiveServer

TEXT = "Grüße an <|im_end|> 🇯🇵"


def post(server: LiveServer, path: str, **body: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, trust_env=False).json()


def test_tokenize_and_detokenize_round_trip(hash_server: LiveServer) -> None:
    tokenizer = hash_server.service.tokenizer
    ids = post(hash_server, "/tokenize", content=TEXT)["tokens"]
    assert ids == tokenizer.encode(TEXT, parse_special=True)
    assert post(hash_server, "/detokenize", tokens=ids) == {"content": TEXT}
    assert post(hash_server, "/tokenize", content=TEXT, parse_special=False)["tokens"] == tokenizer.encode(TEXT)
    pieces = post(hash_server, "/tokenize", content=TEXT, with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    encoded = [one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in pieces]
    assert b"".join(encoded).decode() == TEXT
    assert "not in the vocabulary" in post(hash_server, "/detokenize", tokens=[1 << 30])["error"]["message"]


def test_apply_template_returns_the_rendered_prompt(hash_server: LiveServer) -> None:
    prompt = post(hash_server, "/apply-template", messages=[{"role": "user", "content": "Hi <|im_end|>"}])["prompt"]
    assert prompt.endswith("<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n")
    ids = hash_server.call(hash_server.service.encode([Message("user", "Hi <|im_end|>")]))
    assert prompt == post(hash_server, "/detokenize", tokens=ids)["content"]


USER = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "Well"}


def test_request_chooses_the_end_of_the_prompt(hash_server: LiveServer) -> None:
    asks = "<|im_start|>assistant\n"
    reported: Callable[..., str] = lambda **asked: post(hash_server, "/apply-template", **asked)["prompt"]  # noqa: E731
    assert reported(messages=[USER]).endswith(asks)
    assert reported(messages=[USER], add_generation_prompt=True).endswith(asks)
    assert reported(messages=[USER], add_generation_prompt=False).endswith("Hi<|im_end|>\n")
    assert reported(messages=[USER, BEGUN], continue_final_message=True).endswith(f"{asks}Well")
    assert reported(messages=[USER, BEGUN], add_generation_prompt=False).endswith("Well<|im_end|>\n")


@pytest.mark.parametrize("path", ["/apply-template", "/tokenize"])
@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt: it cannot be true"),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message: the last message is not"),
        ({"messages": []}, "messages"),
        ({"chat_template": "{{ messages }}"}, "chat_template: it is not supported"),
        ({"model": "other"}, "does not exist here"),
    ],
)
def test_invalid_conversation_is_refused(
    hash_server: LiveServer, path: str, asked: dict[str, Any], problem: str
) -> None:
    assert problem in post(hash_server, path, **{"messages": [USER, BEGUN], **asked})["error"]["message"]


def test_vllm_clients_can_count_tokens_of_a_prompt(hash_server: LiveServer) -> None:
    tokenizer = hash_server.service.tokenizer
    ids = tokenizer.encode(TEXT, parse_special=True)
    counted = {"count": len(ids), "max_model_len": 2048, "tokens": ids, "token_strs": None}
    assert post(hash_server, "/tokenize", model="hash", prompt=TEXT) == counted
    reported = post(hash_server, "/tokenize", prompt="a test", return_token_strs=True)
    assert reported["token_strs"] == ["a", "Ġtest"]
    assert post(hash_server, "/detokenize", model="hash", tokens=ids) == {"prompt": TEXT}


def test_vllm_clients_can_count_tokens_of_a_conversation(hash_server: LiveServer) -> None:
    ids = list(hash_server.call(hash_server.service.encode([Message("user", "Hi")])))
    reported = post(hash_server, "/tokenize", model="hash", messages=[USER])
    assert (reported["tokens"], reported["count"]) == (ids, len(ids))
    [*_, last] = hash_server.service.tokenizer.encode("<|im_end|>\n", parse_special=True)
    assert post(hash_server, "/tokenize", messages=[USER], add_generation_prompt=False)["tokens"][-1] == last


def test_prompt_has_a_bos_token_unless_disabled(hash_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = hash_server.service.tokenizer
    ids = tokenizer.encode("Hi")
    monkeypatch.setattr(tokenizer, "add_bos", True)
    monkeypatch.setattr(tokenizer, "bos_id", 1)
    assert post(hash_server, "/tokenize", prompt="Hi")["tokens"] == [1, *ids]
    assert post(hash_server, "/tokenize", prompt="Hi", add_special_tokens=False)["tokens"] == ids
    assert post(hash_server, "/tokenize", content="Hi")["tokens"] == ids
    assert post(hash_server, "/tokenize", content="Hi", add_special=True)["tokens"] == [1, *ids]


@pytest.mark.parametrize("asked", [{}, {"content": "a", "prompt": "a"}, {"prompt": "a", "messages": [USER]}])
def test_exactly_one_text_is_required(hash_server: LiveServer, asked: dict[str, Any]) -> None:
    assert "send one of content, prompt, and messages" in post(hash_server, "/tokenize", **asked)["error"]["message"]


def test_props_report_the_served_model(hash_server: LiveServer) -> None:
    reported = httpx.get(f"{hash_server.url}/props?model=&autoload=false", trust_env=False).json()
    assert reported["default_generation_settings"]["n_ctx"] == 2048
    assert (reported["total_slots"], reported["model_alias"]) == (32, "hash")
    assert reported["chat_template"] == hash_server.service.tokenizer.chat_template
    assert reported["modalities"] == {"vision": False, "audio": False}
