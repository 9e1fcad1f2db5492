"""Infill requests of llama.cpp's server, compared with the exact output of the hash model."""

from typing import Any

import httpx

from app.text.infilling import Gap, Infilling, OtherFile
from tests.app.server.live_server import LiveServer
from tests.support.hash_model import expected_output

BEFORE, BEHIND = "def add(a, b):\n    ", "\n\nprint(add(1, 2))\n"
OTHERS = [{"filename": f"{name}.py", "text": f"def {name}():\n    return 1\n" * 9} for name in ("one", "two")]


def infill(server: LiveServer, **asked: Any) -> dict[str, Any]:
    body = {"input_prefix": BEFORE, "input_suffix": BEHIND, "n_predict": 12, "ignore_eos": True, "top_k": 0, **asked}
    answer = httpx.post(f"{server.url}/infill", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def prompt_of(server: LiveServer, gap: Gap) -> list[int]:
    tokenizer = server.service.tokenizer
    infilling = Infilling.of(tokenizer.control_tokens)
    assert infilling is not None
    parts = list(infilling.parts(gap))
    return [one for part in parts for one in ([part] if isinstance(part, int) else tokenizer.encode(part))]


def expected(server: LiveServer, gap: Gap, count: int = 12) -> str:
    ids = tuple(prompt_of(server, gap))
    return server.service.tokenizer.decode(expected_output(ids, count), continues_text=True)


def test_prompt_is_appended_to_the_prefix(code_server: LiveServer) -> None:
    reply = infill(code_server, prompt="return ")
    assert reply["content"] == expected(code_server, Gap(BEFORE + "return ", BEHIND))
    assert (reply["tokens_predicted"], reply["stop_type"]) == (12, "limit")


def test_other_files_come_first_in_the_format_of_the_model(code_server: LiveServer) -> None:
    gap = Gap(BEFORE, BEHIND, [OtherFile(one["filename"], one["text"]) for one in OTHERS])
    reply = infill(code_server, input_extra=OTHERS)
    assert reply["content"] == expected(code_server, gap)
    assert reply["tokens_evaluated"] == len(prompt_of(code_server, gap))


def test_only_the_last_files_are_kept_if_they_do_not_fit(code_server: LiveServer) -> None:
    many = [{"filename": f"{number}.py", "text": f"# {number} of many\n" * 60} for number in range(12)]
    reply = infill(code_server, input_extra=many)
    assert (reply["truncated"], reply["tokens_predicted"]) == (True, 12)
    assert 1000 < reply["tokens_evaluated"] <= 2048 - 12
    kept = [OtherFile(one["filename"], one["text"]) for one in many]
    fitting = [n for n in range(12) if reply["content"] == expected(code_server, Gap(BEFORE, BEHIND, kept[n:]))]
    assert len(fitting) == 1
    assert not infill(code_server, input_extra=OTHERS)["truncated"]
    alone = httpx.post(f"{code_server.url}/infill", json={"input_prefix": "# far too long\n" * 2000}, trust_env=False)
    assert (alone.status_code, "exceeds the available context size" in alone.text) == (400, True)


def test_warm_up_prefills_and_generates_nothing(code_server: LiveServer) -> None:
    prefix = "# a file of its own\n" * 20
    warmed = infill(code_server, input_prefix=prefix, n_predict=0, samplers=[], t_max_predict_ms=1)
    assert (warmed["content"], warmed["tokens_predicted"], warmed["stop"]) == ("", 0, True)
    asked = infill(code_server, input_prefix=prefix)
    assert asked["tokens_cached"] >= asked["tokens_evaluated"] - 16 > 50


def test_time_limit_ends_the_reply_after_a_line(code_server: LiveServer) -> None:
    short = infill(code_server, n_predict=1500, t_max_predict_ms=1)
    assert "\n" in short["content"]
    assert 1 < short["tokens_predicted"] < 1500
    assert (short["stop_type"], short["has_new_line"]) == ("limit", True)


def test_time_limit_of_the_prompt_ends_the_request(code_server: LiveServer) -> None:
    long = "# a line that has not been read before\n" * 150
    given_up = infill(code_server, input_prefix=long, t_max_prompt_ms=1)
    assert (given_up["content"], given_up["tokens_predicted"], given_up["stop_type"]) == ("", 0, "limit")
    assert infill(code_server, input_prefix=long)["tokens_predicted"] == 12


def test_model_without_infill_tokens_refuses_infill(hash_server: LiveServer) -> None:
    answer = httpx.post(f"{hash_server.url}/infill", json={"input_prefix": "a"}, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "hash does not support infilling" in answer.json()["error"]["message"]
