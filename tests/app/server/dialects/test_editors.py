"""Requests of editors, with the fields that their sources set. Each test is named after a client."""

import json
from typing import Any

import httpx

from tests.app.server.live_server import LiveServer

PREFIX, SUFFIX = "def fib(n):\n    if n < 2:\n        return n\n    return ", "\n\nprint(fib(10))\n"
SYSTEM, QUESTION = "You are a coding assistant. " * 30, {"role": "user", "content": "Write a loop."}


def get(server: LiveServer, path: str) -> Any:
    return httpx.get(f"{server.url}{path}", trust_env=False).raise_for_status().json()


def post(server: LiveServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, trust_env=False).raise_for_status()


def lines(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = post(server, path, body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_requests_of_vs_code_copilot_are_answered(hash_server: LiveServer) -> None:
    version = get(hash_server, "/api/version")["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]
    [listed] = get(hash_server, "/api/tags")["models"]
    shown = post(hash_server, "/api/show", {"model": listed["model"]}).json()
    info = shown["model_info"]
    assert info[f"{info['general.architecture']}.context_length"] == 2048
    assert (info["general.basename"], shown["details"]["family"]) == ("hash", info["general.architecture"])
    assert "vision" not in shown["capabilities"]
    asked = {"model": listed["model"], "messages": [QUESTION], "temperature": 0.1, "top_p": 1, "n": 1, "stream": True}
    body = {**asked, "stream_options": {"include_usage": True}, "max_completion_tokens": 5}
    events = post(hash_server, "/v1/chat/completions", body).text.split("\n\n")[:-1]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] <= 5


def test_requests_of_jetbrains_are_answered(hash_server: LiveServer) -> None:
    assert httpx.get(hash_server.url, trust_env=False).text == "Ollama is running"
    [model] = get(hash_server, "/api/tags")["models"]
    options = {"num_ctx": 8192, "num_predict": 3, "temperature": 0.2}
    messages = [{"role": "system", "content": SYSTEM}, QUESTION]
    *_, last = lines(hash_server, "/api/chat", {"model": model["name"], "messages": messages, "options": options})
    assert last["done"]
    [listed] = get(hash_server, "/api/v0/models")["data"]
    asked = {"model": listed["id"], "messages": messages, "max_tokens": 3, "stream": True}
    assert post(hash_server, "/v1/chat/completions", asked).text.endswith("data: [DONE]\n\n")


def test_chat_requests_of_continue_are_answered(hash_server: LiveServer) -> None:
    shown = post(hash_server, "/api/show", {"name": "hash"}).json()
    assert [line.split() for line in shown["parameters"].splitlines()] == [["num_ctx", "2048"]]
    options = {"temperature": 0.5, "top_p": None, "num_predict": 4, "num_ctx": 2048, "mirostat": None, "use_mmap": True}
    body = {"model": "hash", "messages": [QUESTION], "options": {**options, "num_thread": 4}, "keep_alive": 1800}
    parts = lines(hash_server, "/api/chat", {**body, "stream": True})
    assert {part["message"]["role"] for part in parts} == {"assistant"}
    assert "".join(part["message"]["content"] for part in parts)


def test_autocomplete_requests_of_continue_are_answered(code_server: LiveServer) -> None:
    assert ".Suffix" in post(code_server, "/api/show", {"name": "starcoder"}).json()["template"]
    marks = [f"<fim_{name}>" for name in ("prefix", "suffix", "middle", "pad")]
    stops = [*marks, "<|endoftext|>", "<|im_end|>", "<|repo_name|>", "\n\n", "\r\n\r\n", "/src/", "#- coding: utf-8"]
    # stop strings that Continue sets for the model, for all models, and for the language
    words = ["```", "t.", "\nt", "<file_sep>", "def ", "class ", '"""#']
    options = {"temperature": 0.01, "num_predict": 8, "stop": [*stops, *words], "num_ctx": 1024}
    body = {"model": "starcoder", "prompt": PREFIX, "suffix": SUFFIX, "options": options, "keep_alive": 1800}
    parts = lines(code_server, "/api/generate", {**body, "stream": True, "raw": False})
    assert parts[-1]["done"]
    marked = f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>"
    raw = lines(code_server, "/api/generate", {**body, "prompt": marked, "suffix": "", "raw": True, "stream": True})
    openai = {"model": "starcoder", "prompt": marked, "max_tokens": 8, "stop": options["stop"], "temperature": 0.01}
    reported = post(code_server, "/v1/completions", openai).json()
    counts = (parts[-1]["prompt_eval_count"], raw[-1]["prompt_eval_count"], reported["usage"]["prompt_tokens"])
    assert counts == (counts[0],) * 3  # text of control tokens in a prompt counts as the tokens


def test_edit_predictions_of_zed_are_answered(code_server: LiveServer) -> None:
    marks = ["<|endoftext|>", "<|file_separator|>", "<|fim_pad|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    stops = [*marks, "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<PRE>", "<SUF>", "<MID>", "[PREFIX]", "[SUFFIX]"]
    prompt = f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>"
    options = {"num_predict": 64, "temperature": 0.2, "stop": stops}
    body = {"model": "starcoder", "prompt": prompt, "raw": True, "stream": False, "options": options}
    reply = post(code_server, "/api/generate", body).json()
    assert isinstance(reply["response"], str)
    assert (reply["done"], reply["eval_count"] <= 64) == (True, True)


def test_requests_of_cline_are_answered(hash_server: LiveServer) -> None:
    assert get(hash_server, "/api/tags")["models"][0]["name"] == "hash"
    messages = [{"role": "system", "content": SYSTEM}, {**QUESTION, "images": []}]
    body = {"model": "hash", "messages": messages, "stream": True, "options": {"num_ctx": 32768, "num_predict": 3}}
    first, again = (lines(hash_server, "/api/chat", body)[-1] for _ in range(2))
    assert first["prompt_eval_count"] == again["prompt_eval_count"] > 150
    assert again["eval_count"] <= 3


def test_requests_of_llama_vscode_are_answered(code_server: LiveServer) -> None:
    extra = [{"filename": f"{name}.py", "text": f"# {name}\n" * 40, "time": 1} for name in "abc"]
    own = {"cache_prompt": True, "t_max_prompt_ms": 5000}
    warm = {"input_prefix": "", "input_suffix": "", "input_extra": extra, "prompt": "", "n_predict": 0, "samplers": []}
    assert post(code_server, "/infill", {**warm, **own, "t_max_predict_ms": 1}).json()["content"] == ""
    sampling = {"top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"]}
    gap = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": extra, "prompt": "    ret", "n_indent": 4}
    reply = post(code_server, "/infill", {**gap, **sampling, **own, "n_predict": 16, "t_max_predict_ms": 2500}).json()
    assert reply["tokens_cached"] >= 240  # the warm-up request has prefilled these tokens
    assert reply["tokens_predicted"] <= 16
    assert reply["timings"]["prompt_n"] == reply["tokens_evaluated"] - reply["tokens_cached"]
    assert reply["generation_settings"]["n_ctx"] == 2048
    assert get(code_server, "/props?model=&autoload=false")["default_generation_settings"]["n_ctx"] == 2048
    assert get(code_server, "/v1/models")["data"][0]["id"] == "starcoder"


def test_requests_of_llama_vim_are_answered(code_server: LiveServer) -> None:
    own = {
        "id_slot": 0,
        "cache_prompt": True,
        "response_fields": ["content", "timings/prompt_n"],
        "t_max_prompt_ms": 500,
    }
    gap = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": [], "prompt": "", "n_indent": 0}
    sampling = {"top_k": 40, "top_p": 0.90, "samplers": ["top_k", "top_p", "infill"], "n_predict": 8}
    reply = post(code_server, "/infill", {**gap, **own, **sampling, "stream": False, "t_max_predict_ms": 1000}).json()
    assert isinstance(reply["content"], str)
