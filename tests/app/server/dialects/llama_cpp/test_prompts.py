"""All formats of prompts and logit biases in llama.cpp's completions, compared with exact output."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from tests.app.server.dialects.llama_cpp.test_completions import PROMPT, complete, continued, post
from tests.app.server.live_server import LiveServer, controlled_engine

OTHER = "Another prompt"


@pytest.fixture(scope="module")
def starting_server(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[LiveServer]:
    """A server whose tokenizer adds a BOS token to each prompt."""
    starting = copy.copy(tokenizer)
    starting.add_bos, starting.bos_id = True, tokenizer.control_tokens["<|im_start|>"]
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, starting, renderer) as server:
        yield server
    engine.assert_empty()


def events(server: LiveServer, **asked: Any) -> list[dict[str, Any]]:
    answer = post(server, **{"prompt": PROMPT, "n_predict": 8, "top_k": 0, "stream": True, **asked})
    assert answer.status_code == 200, answer.text
    return [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:-1]]


def test_prompt_may_be_text_ids_a_mix_or_an_object(hash_server: LiveServer) -> None:
    tokenizer = hash_server.service.tokenizer
    ids = tokenizer.encode(PROMPT)
    same = complete(hash_server)
    mixed = [PROMPT[:11], *tokenizer.encode(PROMPT[11:])]
    for prompt in (ids, [PROMPT], [ids], mixed, [mixed], {"prompt_string": PROMPT}, [{"prompt_string": PROMPT}]):
        reply = complete(hash_server, prompt=prompt)
        assert (reply["content"], reply["prompt"]) == (same["content"], PROMPT)


def test_several_prompts_return_a_list(hash_server: LiveServer) -> None:
    ids = hash_server.service.tokenizer.encode(OTHER)
    answer = post(hash_server, prompt=[PROMPT, ids, {"prompt_string": OTHER}], n_predict=8, top_k=0, ignore_eos=True)
    replies = answer.json()
    assert [reply["index"] for reply in replies] == [0, 1, 2]
    assert replies[0]["content"] == continued(hash_server, hash_server.service.tokenizer.encode(PROMPT), 8)
    assert replies[1]["content"] == replies[2]["content"] == continued(hash_server, ids, 8)
    assert [reply["prompt"] for reply in replies] == [PROMPT, OTHER, OTHER]
    assert [reply["tokens_evaluated"] for reply in replies] == [len(reply_ids) for reply_ids in (
        hash_server.service.tokenizer.encode(PROMPT), ids, ids)]  # fmt: skip


def test_streamed_chunks_of_several_prompts_have_their_index(hash_server: LiveServer) -> None:
    whole = post(hash_server, prompt=[PROMPT, OTHER], n_predict=8, top_k=0, ignore_eos=True).json()
    reported = events(hash_server, prompt=[PROMPT, OTHER], ignore_eos=True)
    for index in (0, 1):
        own = [event for event in reported if event["index"] == index]
        assert "".join(event["content"] for event in own) == whole[index]["content"]
        assert [event["stop"] for event in own] == [*[False] * (len(own) - 1), True]
        assert own[-1]["prompt"] == (PROMPT, OTHER)[index]


def test_several_replies_use_consecutive_seeds(smollm2_server: LiveServer) -> None:
    asked: dict[str, Any] = {"n_predict": 4, "temperature": 1.5, "top_p": 1}
    several = post(smollm2_server, prompt=PROMPT, n_cmpl=3, seed=7, top_k=0, **asked).json()
    assert [reply["generation_settings"]["seed"] for reply in several] == [7, 8, 9]
    alone = [complete(smollm2_server, seed=seed, **asked)["content"] for seed in (7, 8, 9)]
    assert [reply["content"] for reply in several] == alone


def test_prompt_that_starts_with_text_gets_a_bos_token(starting_server: LiveServer) -> None:
    tokenizer = starting_server.service.tokenizer
    ids = tokenizer.encode(PROMPT)
    for prompt, counted in (
        (PROMPT, len(ids) + 1),
        ([PROMPT[:11], *tokenizer.encode(PROMPT[11:])], len(ids) + 1),
        ([ids[0], PROMPT], len(ids) + 1),
        (ids, len(ids)),
    ):
        assert complete(starting_server, prompt=prompt)["tokens_evaluated"] == counted


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "prompt"),
        ([[]], "prompt"),
        ([1, [2]], "prompt: a list with token ids may contain only strings and token ids"),
        ([1, {"prompt_string": "a"}], "prompt: a list with token ids"),
        ([10**9], "not in the vocabulary"),
        (["a", [10**9]], "prompt[1]: token id 1000000000 is not in the vocabulary"),
        (["a", ""], "prompt[1]: it is empty"),
        ({"prompt_string": "a", "multimodal_data": ["AA=="]}, "prompt.multimodal_data: this version reads text only"),
        (["a", {"prompt_string": "a", "multimodal_data": ["AA=="]}], "prompt[1].multimodal_data"),
        (["a"] * 257, "prompt: the request asks for 257 replies (257 prompts times 1), and the limit is 256"),
        ({"text": "a"}, "prompt.prompt_string: it is required"),
    ],
)
def test_error_names_the_invalid_prompt(hash_server: LiveServer, prompt: Any, problem: str) -> None:
    refused = post(hash_server, prompt=prompt)
    assert refused.status_code == 400
    assert problem in refused.json()["error"]["message"]


def test_too_long_prompt_has_the_message_of_llama_cpp(hash_server: LiveServer) -> None:
    refused = post(hash_server, prompt=[5] * 3000)
    assert refused.status_code == 400
    assert refused.json()["error"] == {
        "code": 400,
        "message": "The request (3000 tokens) exceeds the available context size (2048 tokens). Shorten the prompt.",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 3000,
        "n_ctx": 2048,
    }


@pytest.mark.parametrize(
    "bias",
    [lambda ids: [[ids, -100]], lambda ids: [[ids, False]], lambda ids: {str(ids): -100}],
    ids=["number", "false", "object"],
)
def test_bias_applies_to_a_token_id(smollm2_server: LiveServer, bias: Any) -> None:
    asked = {"prompt": "one two three four, one two three four, one two three", "temperature": 0, "n_predict": 1}
    [four] = smollm2_server.service.tokenizer.encode(" four")
    assert complete(smollm2_server, **asked)["content"] == " four"
    assert complete(smollm2_server, **asked, logit_bias=bias(four))["content"] != " four"


@pytest.mark.parametrize("bias", [[[" four", -100]], [[" four", False]], {" four": -100}, {" four five": -100}])
def test_bias_applies_to_the_tokens_of_a_text(smollm2_server: LiveServer, bias: Any) -> None:
    asked = {"prompt": "one two three four, one two three four, one two three", "temperature": 0, "n_predict": 1}
    reply = complete(smollm2_server, **asked, logit_bias=bias)
    assert reply["content"] != " four"
    reported = reply["generation_settings"]["logit_bias"]
    assert {"bias": -100.0, "token": smollm2_server.service.tokenizer.encode(" four")[0]} in reported
