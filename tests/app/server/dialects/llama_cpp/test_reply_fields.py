"""Fields of llama.cpp's completions other than the text: ids, settings, progress, and selected fields."""

from typing import Any

import pytest

from tests.app.server.dialects.llama_cpp.test_completions import PROMPT, complete, post
from tests.app.server.dialects.llama_cpp.test_prompts import events
from tests.app.server.live_server import LiveServer
from tests.support.hash_model import expected_output


def test_token_ids_are_returned_on_request(hash_server: LiveServer) -> None:
    expected = expected_output(tuple(hash_server.service.tokenizer.encode(PROMPT)), 20)
    assert complete(hash_server, ignore_eos=True)["tokens"] == []
    assert complete(hash_server, ignore_eos=True, return_tokens=True)["tokens"] == expected


def test_every_chunk_has_its_token_ids(hash_server: LiveServer) -> None:
    expected = expected_output(tuple(hash_server.service.tokenizer.encode(PROMPT)), 8)
    *parts, last = events(hash_server, ignore_eos=True)
    assert [token_id for part in (*parts, last) for token_id in part["tokens"]] == expected
    assert all(part["tokens"] for part in parts)
    assert [part["tokens_predicted"] for part in parts] == sorted(part["tokens_predicted"] for part in parts)
    assert (last["tokens_predicted"], last["stop"]) == (8, True)


def test_token_ids_include_the_end_token(smollm2_server: LiveServer) -> None:
    prompt = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    reply = complete(smollm2_server, prompt=prompt, temperature=0, n_predict=200, return_tokens=True)
    assert reply["stop_type"] == "eos"
    assert reply["tokens"][-1] in smollm2_server.service.tokenizer.end_of_generation_ids
    assert len(reply["tokens"]) == reply["tokens_predicted"]
    assert reply["prompt"] == prompt


def test_request_selects_the_fields_of_its_reply(hash_server: LiveServer) -> None:
    fields = ["content", "generation_settings/n_predict", "prompt", "no/such", "timings/predicted_n", "content/x"]
    reply = complete(hash_server, response_fields=fields, ignore_eos=True)
    assert list(reply) == ["content", "generation_settings/n_predict", "prompt", "timings/predicted_n"]
    assert (reply["generation_settings/n_predict"], reply["prompt"]) == (20, PROMPT)
    *_, last = events(hash_server, response_fields=["stop", "prompt"])
    assert last == {"stop": True, "prompt": PROMPT}
    assert "timings" in complete(hash_server, response_fields=[])
    several = post(hash_server, prompt=[PROMPT, PROMPT], n_predict=1, response_fields=["index"]).json()
    assert several == [{"index": 0}, {"index": 1}]


def test_generation_settings_report_the_values_in_effect(hash_server: LiveServer) -> None:
    asked: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "xtc_probability": 0.2,
        "xtc_threshold": 0.3,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "dry_multiplier": 0.5,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_sequence_breakers": ["\n"],
        "seed": 11,
        "n_predict": 3,
        "n_probs": 2,
        "stop": ["zzz"],
        "ignore_eos": True,
        "grammar": 'root ::= ("a" | "b")+',
    }
    settings = complete(hash_server, **asked, logit_bias=[[5, 1.5]])["generation_settings"]
    assert {name: settings[name] for name in asked} == asked
    assert settings["logit_bias"] == [{"bias": 1.5, "token": 5}]
    assert (settings["max_tokens"], settings["mirostat"], settings["typical_p"], settings["n_ctx"]) == (3, 0, 1, 2048)
    named = complete(hash_server, samplers="kt")["generation_settings"]
    assert (sorted(named["samplers"]), named["top_p"]) == (["temperature", "top_k"], 1)


def test_stream_reports_progress_and_timings(hash_server: LiveServer) -> None:
    reported = events(hash_server, prompt=f"{PROMPT} of progress. " * 30, return_progress=True, timings_per_token=True)
    progress = [event["prompt_progress"] for event in reported if "prompt_progress" in event]
    assert progress[-1]["processed"] == progress[-1]["total"] == reported[-1]["tokens_evaluated"]
    texts = [event for event in reported if event["content"]]
    assert [event["timings"]["predicted_n"] for event in texts] == [event["tokens_predicted"] for event in texts]
    assert texts[0]["timings"]["prompt_n"] + texts[0]["timings"]["cache_n"] == reported[-1]["tokens_evaluated"]
    assert not any("timings" in event or "prompt_progress" in event for event in events(hash_server)[:-1])


def test_seed_of_2_to_the_32_minus_1_draws_a_random_seed(smollm2_server: LiveServer) -> None:
    seeds = {complete(smollm2_server, seed=2**32 - 1, n_predict=1)["generation_settings"]["seed"] for _ in range(3)}
    assert len(seeds) == 3
    assert 2**32 - 1 not in seeds


def test_post_sampling_probabilities_are_those_of_the_sampler(smollm2_server: LiveServer) -> None:
    asked: dict[str, Any] = {"n_predict": 3, "n_probs": 10, "post_sampling_probs": True}
    greedy = complete(smollm2_server, temperature=0, **asked)["completion_probabilities"]
    assert [one["prob"] for one in greedy] == [1, 1, 1]
    assert [[two["prob"] for two in one["top_probs"]] for one in greedy] == [[1, *[0] * 9]] * 3
    drawn = complete(smollm2_server, temperature=1, top_k=4, top_p=1, min_p=0, seed=1, **asked)
    for one in drawn["completion_probabilities"]:
        assert sum(two["prob"] for two in one["top_probs"]) == pytest.approx(1)
        assert sum(two["prob"] > 0 for two in one["top_probs"]) == 4
        assert one["prob"] in [two["prob"] for two in one["top_probs"]]
        assert not {"logprob", "top_logprobs"}.intersection(one)
    assert drawn["generation_settings"]["post_sampling_probs"]
    assert "completion_probabilities" not in complete(smollm2_server, n_predict=1, post_sampling_probs=True)
