"""Text completions through the real openai client, compared with exact output."""

from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion

from app.generation.template import ChatTemplateRenderer
from app.text.gguf_tokenizer import from_gguf
from quant.gguf import GGUFFile
from tests.app.server.dialects.openai.test_chat import client
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.support.hash_model import expected_output

PROMPT = "Once upon a time"


def expected_text(server: LiveServer, prompt: list[int], count: int) -> str:
    return server.service.tokenizer.decode(expected_output(prompt, count), continues_text=True)


def encoded(server: LiveServer, text: str) -> list[int]:
    return server.service.tokenizer.encode(text, parse_special=True)


def ask(server: LiveServer, **asked: Any) -> Completion:
    with client(server) as api:
        reply: Completion = api.completions.create(model="hash", extra_body={"ignore_eos": True}, **asked)
    return reply


def test_text_equals_the_model_output(hash_server: LiveServer) -> None:
    reply = ask(hash_server, prompt=PROMPT, max_tokens=20)
    assert reply.choices[0].text == expected_text(hash_server, encoded(hash_server, PROMPT), 20)
    assert reply.choices[0].finish_reason == "length"
    assert reply.id.startswith("cmpl-")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(encoded(hash_server, PROMPT))


def test_default_limit_is_16_tokens(hash_server: LiveServer) -> None:
    usage = ask(hash_server, prompt=PROMPT).usage
    assert usage is not None
    assert usage.completion_tokens == 16


def test_control_tokens_in_a_prompt_are_encoded_as_such(hash_server: LiveServer) -> None:
    usage = ask(hash_server, prompt="<|im_start|><|im_end|>").usage
    assert usage is not None
    assert usage.prompt_tokens == 2


@pytest.mark.parametrize("kind", ["texts", "ids", "lists of ids"])
def test_n_of_2_gives_two_choices_per_prompt(hash_server: LiveServer, kind: str) -> None:
    texts = ["One", "Two little words"] if kind != "ids" else ["Two little words"]
    ids = [encoded(hash_server, text) for text in texts]
    prompt: Any = {"texts": texts, "ids": ids[0], "lists of ids": ids}[kind]
    reply = ask(hash_server, prompt=prompt, n=2, max_tokens=9)
    expected = [expected_text(hash_server, prompt_ids, 9) for prompt_ids in ids for _ in range(2)]
    assert [choice.text for choice in reply.choices] == expected
    assert [choice.index for choice in reply.choices] == list(range(len(expected)))
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(map(len, ids))
    assert reply.usage.completion_tokens == 9 * len(expected)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_text(hash_server: LiveServer, stream: bool) -> None:
    expected = PROMPT + expected_text(hash_server, encoded(hash_server, PROMPT), 5)
    asked: dict[str, Any] = {"prompt": PROMPT, "echo": True, "max_tokens": 5}
    if not stream:
        assert ask(hash_server, **asked).choices[0].text == expected
        return
    # The client's type of a chunk does not allow a null finish_reason, which means "not finished".
    with (
        client(hash_server, strict=False) as api,
        api.completions.create(model="hash", stream=True, extra_body={"ignore_eos": True}, **asked) as events,
    ):
        assert "".join(choice.text for chunk in events for choice in chunk.choices) == expected


def test_echo_of_token_ids_is_their_text(hash_server: LiveServer) -> None:
    reply = ask(hash_server, prompt=encoded(hash_server, PROMPT), echo=True, max_tokens=1)
    assert reply.choices[0].text.startswith(PROMPT)


@pytest.mark.parametrize("prompt", ["The capital of France is Paris, 🇫🇷 and", "The"])
def test_echo_with_logprobs_includes_those_of_the_prompt(smollm2_server: LiveServer, prompt: str) -> None:
    """Evaluation tools compute the scores of texts from these: every token except the first has a probability."""
    asked: dict[str, Any] = {"model": "smollm2:135m", "prompt": prompt, "temperature": 0, "max_tokens": 3}
    with client(smollm2_server, strict=False) as api:
        reported = api.completions.create(**asked, echo=True, logprobs=1)
        plain = api.completions.create(**asked, logprobs=1)
    columns, alone = reported.choices[0].logprobs, plain.choices[0].logprobs
    assert columns is not None
    assert alone is not None
    assert reported.choices[0].text == prompt + plain.choices[0].text
    count = len(encoded(smollm2_server, prompt))
    assert columns.tokens is not None
    assert columns.token_logprobs is not None
    assert columns.text_offset is not None
    assert len(columns.tokens) == count + 3
    assert columns.tokens[count:] == alone.tokens
    assert columns.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in columns.token_logprobs[1:])
    assert columns.token_logprobs[count:] == alone.token_logprobs
    text = reported.choices[0].text
    for token, offset in zip(columns.tokens, columns.text_offset, strict=True):
        assert "\ufffd" in token or text[offset:].startswith(token)


def test_every_choice_includes_the_logprobs_of_the_prompt(smollm2_server: LiveServer) -> None:
    asked: dict[str, Any] = {"model": "smollm2:135m", "prompt": "The capital of France", "temperature": 0}
    with client(smollm2_server, strict=False) as api:
        reported = api.completions.create(**asked, echo=True, logprobs=1, max_tokens=3, n=3)
    first, *others = [choice.logprobs for choice in reported.choices]
    assert first is not None
    assert first.token_logprobs is not None
    assert len(first.token_logprobs) == len(encoded(smollm2_server, "The capital of France")) + 3
    assert others == [first, first]


def test_logprobs_are_parallel_lists_that_match_the_text(smollm2_server: LiveServer) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2:135m",
        "prompt": "The flag of Japan: 🇯🇵. The flag of France: 🇫🇷. The flag of",
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": 2,
    }
    with client(smollm2_server) as api:
        whole: Completion = api.completions.create(**asked)
    with client(smollm2_server, strict=False) as api, api.completions.create(**asked, stream=True) as stream:
        parts = [choice.logprobs for chunk in stream for choice in chunk.choices if choice.logprobs]
    text, logprobs = whole.choices[0].text, whole.choices[0].logprobs
    assert logprobs is not None
    tokens, offsets, likely = logprobs.tokens, logprobs.text_offset, logprobs.token_logprobs
    assert tokens is not None
    assert offsets is not None
    assert likely is not None
    assert len(tokens) == len(offsets) == len(likely) == len(logprobs.top_logprobs or []) == 8
    for token, offset, after in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
        if "\ufffd" not in token:
            assert text[offset:after] == token
    for token, logprob, top in zip(tokens, likely, logprobs.top_logprobs or [], strict=True):
        assert 1 <= len(top) <= 2
        assert max(top.values()) == top[token] == logprob
    assert [offset for part in parts for offset in part.text_offset or []] == offsets
    assert [token for part in parts for token in part.tokens or []] == tokens


def test_suffix_uses_the_infill_tokens_of_the_model(llama_cpp_models: Path, renderer: ChatTemplateRenderer) -> None:
    with GGUFFile(llama_cpp_models / "ggml-vocab-starcoder.gguf") as file:
        tokenizer = from_gguf(file.metadata)
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        reply = ask(server, prompt="def add(a, b):\n    return ", suffix="\n<fim_middle>", max_tokens=9)
        marks = [tokenizer.control_tokens[f"<fim_{name}>"] for name in ("prefix", "suffix", "middle")]
        before, behind = (tokenizer.encode(text) for text in ("def add(a, b):\n    return ", "\n<fim_middle>"))
        prompt = [marks[0], *before, marks[1], *behind, marks[2]]
        assert reply.choices[0].text == expected_text(server, prompt, 9)
        for refused in ({"prompt": [1, 2]}, {"prompt": "a", "echo": True}):
            with pytest.raises(openai.BadRequestError, match="suffix"):
                ask(server, suffix="b", **refused)


def test_model_without_infill_tokens_refuses_infill(hash_server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support infilling"):
        ask(hash_server, prompt="a", suffix="b")


def test_dry_sampler_ends_a_repetition(smollm2_server: LiveServer) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2:135m",
        "prompt": "one two three four, one two three four, one two three",
        "temperature": 0,
        "max_tokens": 1,
    }
    with client(smollm2_server) as api:
        plain = api.completions.create(**asked).choices[0].text
        dry = api.completions.create(**asked, extra_body={"dry_multiplier": 50.0}).choices[0].text
        across = (
            api.completions.create(**asked, extra_body={"dry_multiplier": 50.0, "dry_sequence_breakers": ["three"]})
            .choices[0]
            .text
        )
    assert plain == across == " four"
    assert dry != " four"
