"""The completion endpoint of llama.cpp's server, compared with the exact output of the hash model."""

import json
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.app.server.live_server import LiveServer
from tests.support.hash_model import expected_output

PROMPT = "The capital of France"
GBNF = 'root ::= city ("," ws city)*\ncity ::= "Rome" | "Oslo"\nws ::= [ ]?'


def post(server: LiveServer, path: str = "/completion", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, trust_env=False)


def complete(server: LiveServer, **asked: Any) -> dict[str, Any]:
    answer = post(server, **{"prompt": PROMPT, "n_predict": 20, "top_k": 0, **asked})
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def continued(server: LiveServer, ids: list[int], count: int) -> str:
    return server.service.tokenizer.decode(expected_output(tuple(ids), count), continues_text=True).removesuffix(
        "\ufffd"
    )


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_stream_and_whole_reply_agree(hash_server: LiveServer, path: str) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "n_predict": 20, "ignore_eos": True, "seed": 3, "top_k": 0}
    whole = post(hash_server, path, **asked).json()
    answer = post(hash_server, path, **asked, stream=True)
    events = [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:-1]]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [*[False] * (len(events) - 1), True]
    ids = hash_server.service.tokenizer.encode(PROMPT)
    assert whole["content"] == continued(hash_server, ids, 20)
    for reported in (whole, events[-1]):
        assert (reported["tokens_predicted"], reported["tokens_evaluated"], reported["truncated"]) == (
            20,
            len(ids),
            False,
        )
        assert (reported["stop_type"], reported["stopping_word"]) == ("limit", "")
        assert reported["has_new_line"] is ("\n" in whole["content"])
        assert reported["timings"]["predicted_n"] == 20
    assert whole["generation_settings"]["seed"] == 3


def test_stop_word_and_probabilities_are_reported(smollm2_server: LiveServer) -> None:
    asked: dict[str, Any] = {"prompt": "One, two, three, four, five,", "temperature": 0, "n_probs": 2}
    reply = complete(smollm2_server, **asked, stop=["eight"])
    assert (reply["stop_type"], reply["stopping_word"]) == ("word", "eight")
    assert reply["content"] == " six, seven, "
    first = reply["completion_probabilities"][0]
    assert (first["token"], len(first["top_logprobs"])) == (" six", 2)
    assert first["top_logprobs"][0] == {key: first[key] for key in ("id", "token", "bytes", "logprob")}


@pytest.mark.parametrize("model", [None, "", "hash"])
def test_request_without_a_model_uses_the_served_model(hash_server: LiveServer, model: str | None) -> None:
    assert complete(hash_server, model=model)["model"] == "hash"


def test_replies_follow_the_requested_grammar(smollm2_server: LiveServer) -> None:
    kept = complete(smollm2_server, grammar=GBNF, prompt="Cities:", n_predict=9)["content"]
    *cities, cut_off = (city.strip() for city in kept.split(","))
    assert set(cities) <= {"Rome", "Oslo"}
    assert any(city.startswith(cut_off) for city in ("Rome", "Oslo"))
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    jsonschema.validate(json.loads(complete(smollm2_server, json_schema=schema)["content"]), schema)
    for bad in ({"grammar": "root = 1"}, {"grammar": 'root ::= "a'}, {"grammar": "root ::= a"}):
        refused = post(smollm2_server, prompt="a", **bad)
        assert (refused.status_code, refused.json()["error"]["message"][:8]) == (400, "grammar:")
    assert (
        "only one grammar"
        in post(smollm2_server, prompt="a", grammar=GBNF, json_schema=schema).json()["error"]["message"]
    )


def test_dry_sampler_ends_a_repetition(smollm2_server: LiveServer) -> None:
    asked = {"prompt": "one two three four, one two three four, one two three", "temperature": 0, "n_predict": 1}
    assert complete(smollm2_server, **asked)["content"] == " four"
    assert complete(smollm2_server, **asked, dry_multiplier=50)["content"] != " four"
    assert complete(smollm2_server, **asked, dry_multiplier=50, samplers=["temperature"])["content"] == " four"


def test_samplers_that_are_not_named_are_off(smollm2_server: LiveServer) -> None:
    asked: dict[str, Any] = {"samplers": ["top_k"], "top_k": 1, "top_p": 0.5, "temperature": 0.1, "repeat_penalty": 2}
    settings = complete(smollm2_server, **asked)["generation_settings"]
    assert (settings["top_k"], settings["top_p"], settings["temperature"]) == (1, 1, 1)
    assert (settings["repeat_penalty"], settings["min_p"]) == (1, 0)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"mirostat": 1}, "mirostat: it is not supported"),
        ({"typical_p": 0.1}, "typical_p"),
        ({"logit_bias": [["a", "b"]]}, "logit_bias: each value must be a number or false"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias: each key must be a token id or a string"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias: token id 9999999 is not in the vocabulary"),
        ({"n_predict": "a"}, "n_predict: Expected"),
        ({"prompt": ""}, "prompt: it is empty"),
        ({"model": "other"}, "does not exist here"),
    ],
)
def test_error_names_unsupported_values(hash_server: LiveServer, body: dict[str, Any], problem: str) -> None:
    refused = post(hash_server, **{"prompt": "a", **body})
    assert refused.status_code in (400, 404)
    assert problem in refused.json()["error"]["message"]
