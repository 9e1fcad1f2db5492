"""What llama.cpp's server tells of itself: its properties, and texts as ids and back."""

from typing import Any

import httpx

from app.chat.messages import Message
from tests.app.server.live_server import LiveServer

TEXT = "Grüße an <|im_end|> 🇯🇵"


def post(server: LiveServer, path: str, **body: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, trust_env=False).json()


def test_texts_become_ids_and_texts_again(hash_server: LiveServer) -> None:
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


def test_a_template_is_applied(hash_server: LiveServer) -> None:
    prompt = post(hash_server, "/apply-template", messages=[{"role": "user", "content": "Hi <|im_end|>"}])["prompt"]
    assert prompt.endswith("<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n")
    ids = hash_server.call(hash_server.service.encode([Message("user", "Hi <|im_end|>")]))
    assert prompt == post(hash_server, "/detokenize", tokens=ids)["content"]


def test_the_server_tells_what_it_holds(hash_server: LiveServer) -> None:
    told = httpx.get(f"{hash_server.url}/props?model=&autoload=false", trust_env=False).json()
    assert told["default_generation_settings"]["n_ctx"] == 2048
    assert (told["total_slots"], told["model_alias"]) == (32, "hash")
    assert told["chat_template"] == hash_server.service.tokenizer.chat_template
    assert told["modalities"] == {"vision": False, "audio": False}
