"""Default sampling: in every dialect, fields that a request leaves out get the values that the model recommends."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.generation.options import API_DEFAULTS, DefaultSampling, GenerationOptions
from app.generation.template import ChatTemplateRenderer
from app.text.gguf_tokenizer import from_gguf
from app.text.tokenizer import Tokenizer
from engine.sampling_params import SamplingParams
from quant.gguf import GGUFFile
from tests.app.server.live_server import LiveServer, controlled_engine

RECOMMENDED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1}
OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
LLAMA = {**OPENAI, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
OLLAMA = {**OPENAI, "temperature": 0.8, "top_k": 40, "top_p": 0.9}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
SILENT: Sequence[tuple[str, dict[str, Any], Mapping[str, float]]] = [
    ("/v1/chat/completions", {**CHAT, "max_tokens": 1, "temperature": None}, OPENAI),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, OPENAI),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}, OPENAI),
    ("/v1/messages", {"model": "code", **CHAT, "max_tokens": 1}, OPENAI),
    ("/api/chat", {"model": "code", **CHAT, "stream": False, "options": {"num_predict": 1}}, OLLAMA),
    ("/api/generate", {"model": "code", "prompt": "Hi", "stream": False, "options": {"num_predict": 1}}, OLLAMA),
    ("/completion", {"prompt": "Hi", "n_predict": 1}, LLAMA),
]
INSERTING: Sequence[tuple[str, dict[str, Any], Mapping[str, float]]] = [
    ("/v1/completions", {"prompt": "a = ", "suffix": "\n", "max_tokens": 1}, OPENAI),
    (
        "/api/generate",
        {"model": "code", "prompt": "a = ", "suffix": "\n", "stream": False, "options": {"num_predict": 1}},
        OLLAMA,
    ),
    ("/infill", {"input_prefix": "a = ", "input_suffix": "\n", "n_predict": 1}, LLAMA),
]


@pytest.fixture(scope="module")
def tokenizer(llama_cpp_models: Path) -> Tokenizer:
    with GGUFFile(llama_cpp_models / "ggml-vocab-starcoder.gguf") as file:
        return from_gguf(file.metadata)


@pytest.fixture(scope="module", params=[RECOMMENDED, None], ids=["model", "none"])
def server(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer, request: pytest.FixtureRequest
) -> Iterator[LiveServer]:
    """A code model's server, in one case with recommended sampling and in the other without."""
    engine, _ = controlled_engine(tokenizer.vocab_size)
    sampling = API_DEFAULTS if request.param is None else DefaultSampling(request.param)
    with LiveServer("code", engine, tokenizer, renderer, sampling=sampling) as server:
        yield server
    engine.assert_empty()


@pytest.fixture
def sampled(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """A list that collects the sampling parameters of each request to the engine."""
    asked: list[SamplingParams] = []
    reply = server.service.reply

    def noted(prompts: Any, options: GenerationOptions, *further: Any) -> Any:
        asked.extend(options.candidates)
        return reply(prompts, options, *further)

    monkeypatch.setattr(server.service, "reply", noted)
    return asked


def post(server: LiveServer, path: str, body: Mapping[str, Any]) -> Any:
    reply = httpx.post(f"{server.url}{path}", json=body, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


def reported(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in RECOMMENDED}


def with_options(path: str, body: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    if path.startswith("/api/"):
        return {**body, "options": {**body["options"], **fields}}
    return {**body, **fields}


def recommends(server: LiveServer) -> bool:
    return server.service.sampling.recommended is not None


@pytest.mark.parametrize(("path", "body", "api"), SILENT, ids=[path for path, *_ in SILENT])
def test_each_dialect_uses_recommended_sampling_by_default(
    server: LiveServer, sampled: list[SamplingParams], path: str, body: dict[str, Any], api: Mapping[str, float]
) -> None:
    base = RECOMMENDED if recommends(server) else api
    for fields in ({}, {"temperature": 0}, {"temperature": 0.3}, {"top_p": 0.5}):
        post(server, path, with_options(path, body, **fields))
        assert reported(sampled.pop()) == {**base, **fields}


@pytest.mark.parametrize(("path", "body", "api"), INSERTING, ids=[path for path, *_ in INSERTING])
def test_infill_uses_the_defaults_without_a_penalty(
    server: LiveServer, sampled: list[SamplingParams], path: str, body: dict[str, Any], api: Mapping[str, float]
) -> None:
    base = {**RECOMMENDED, "repetition_penalty": 1.0} if recommends(server) else api
    for fields in ({}, {"temperature": 0.1, "top_k": 5}):
        post(server, path, with_options(path, body, **fields))
        assert reported(sampled.pop()) == {**base, **fields}


def test_beam_search_uses_no_sampling_defaults(server: LiveServer, sampled: list[SamplingParams]) -> None:
    post(server, "/v1/completions", {"prompt": "Hi", "max_tokens": 1, "use_beam_search": True, "best_of": 2})
    assert reported(sampled.pop()) == OPENAI


def test_zero_penalty_window_turns_the_penalty_off(server: LiveServer, sampled: list[SamplingParams]) -> None:
    post(server, "/completion", {"prompt": "Hi", "n_predict": 1, "repeat_last_n": 0})
    assert sampled.pop().repetition_penalty == 1.0


def test_only_named_samplers_are_used(server: LiveServer, sampled: list[SamplingParams]) -> None:
    post(server, "/completion", {"prompt": "Hi", "n_predict": 1, "samplers": ["top_k"]})
    assert reported(sampled.pop()) == {**OPENAI, "top_k": 20 if recommends(server) else 40}


def test_responses_report_the_values_in_effect(server: LiveServer) -> None:
    base = RECOMMENDED if recommends(server) else OPENAI
    whole = post(server, "/v1/responses", {"input": "Hi", "max_output_tokens": 1})
    assert (whole["temperature"], whole["top_p"]) == (base["temperature"], base["top_p"])
    whole = post(server, "/v1/responses", {"input": "Hi", "max_output_tokens": 1, "top_p": 0.5})
    assert (whole["temperature"], whole["top_p"]) == (base["temperature"], 0.5)


def test_server_reports_the_defaults(server: LiveServer) -> None:
    def get(path: str) -> Any:
        return httpx.get(f"{server.url}{path}", trust_env=False).json()

    expected = RECOMMENDED if recommends(server) else None
    assert [model["default_sampling"] for model in get("/v1/models")["data"]] == [expected]
    assert get("/v1/models/code")["default_sampling"] == expected
    props, base = get("/props")["default_generation_settings"]["params"], RECOMMENDED if expected else LLAMA
    names = {"repeat_penalty": "repetition_penalty"}
    shown = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
    assert {name: props[name] for name in shown} == {name: base[names.get(name, name)] for name in shown}
    lines = post(server, "/api/show", {"model": "code"})["parameters"].splitlines()
    own = ["temperature 0.6", "top_p 0.9", "top_k 20", "min_p 0.02", "repeat_penalty 1.1"]
    assert lines == ["num_ctx 2048", *(own if expected else [])]
