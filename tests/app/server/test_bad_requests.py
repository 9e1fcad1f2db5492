"""Invalid requests get an error in OpenAI's format that names the field, and never a status of 500 or above."""

import gzip
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.generation.template import ChatTemplateRenderer
from app.server.http.request_body import MAX_BODY_BYTES
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import LiveServer, controlled_engine

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"model": "hash", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    COMPLETION: {"model": "hash", "prompt": "Hi", "max_tokens": 1},
}

# Invalid values of each field, as JSON texts, since Python values cannot express all of them.
NOT_A_NUMBER = ("true", '"1"', "[]", "{}", "[1]", '"NaN"')
NOT_AN_INTEGER = (*NOT_A_NUMBER, "1.5", "1e300", "1e999", "9" * 400, str(2**63), str(-(2**64)))
HUGE = ("1e999", "-1e999", "9" * 400, "1e300")
BAD: dict[str, tuple[str, ...]] = {
    "model": ("1", "[]", "{}", '"gpt-5"', '"HASH"', '"hash\\u0000"', '"../hash"'),
    "temperature": (*NOT_A_NUMBER, *HUGE, "-0.1", "100.1"),
    "top_p": (*NOT_A_NUMBER, *HUGE, "-0.1", "1.1"),
    "min_p": (*NOT_A_NUMBER, *HUGE, "-1", "2"),
    "presence_penalty": (*NOT_A_NUMBER, *HUGE, "-2.1", "2.1"),
    "frequency_penalty": (*NOT_A_NUMBER, *HUGE, "-2.1", "2.1"),
    "repetition_penalty": (*NOT_A_NUMBER, *HUGE, "0", "-1", "101"),
    "n": (*NOT_AN_INTEGER, "0", "-1", "17"),
    "seed": NOT_AN_INTEGER,
    "max_tokens": (*NOT_AN_INTEGER, "-3"),
    "top_k": (*NOT_AN_INTEGER, "-2"),
    "min_tokens": (*NOT_AN_INTEGER, "-1", "2"),
    "dry_multiplier": (*NOT_A_NUMBER, *HUGE, "-1", "101"),
    "dry_base": (*NOT_A_NUMBER, *HUGE, "0.9", "5"),
    "dry_allowed_length": (*NOT_AN_INTEGER, "-1"),
    "dry_penalty_last_n": (*NOT_AN_INTEGER, "-2"),
    "dry_sequence_breakers": ("1", '"a"', "[1]", '[""]', "[null]", json.dumps(["a"] * 65), json.dumps(["a" * 65])),
    "xtc_probability": (*NOT_A_NUMBER, *HUGE, "-0.1", "1.1"),
    "xtc_threshold": (*NOT_A_NUMBER, *HUGE, "-0.1", "1.1"),
    "num_ctx": (*NOT_AN_INTEGER, "0", "-1"),
    "options": ("1", "[]", '{"num_ctx": 0}', '{"num_ctx": "many"}'),
    "return_progress": ("1", '"yes"', "[]"),
    "stop": ("1", "true", "{}", '""', '[""]', "[1]", "[null]", '[["a"]]', json.dumps(["a"] * 65), f'"{"a" * 1025}"'),
    "stop_token_ids": ("1", '"1"', "{}", '["1"]', "[-1]", "[49152]", "[1e9]", f"[{2**31}]", json.dumps([1] * 65)),
    "logit_bias": (
        "1",
        "[1]",
        *("[[1]]", '[["a", 1]]', "[[-1, 1]]", "[[1.5, 1]]", "[[49152, 1]]", "[[1, 101]]", "[[1, true]]", "[[1, 1, 1]]"),
        '{"a": 1}',
        '{"-1": 1}',
        '{"1.5": 1}',
        '{"49152": 1}',
        '{"1": 101}',
        '{"1": "1"}',
        '{"1": true}',
        '{"1": 1e999}',
        f'{{"{"9" * 300}": 1}}',
        json.dumps({str(key): 1 for key in range(1025)}),
    ),
    "ignore_eos": ("1", '"true"', "[]"),
    "stream": ("1", '"true"', "[]"),
    "stream_options": (
        "1",
        "true",
        "[]",
        '{"include_usage": 1}',
        '{"include_usage": true}',  # invalid without "stream": true
        *(f'{{"interval_ms": {bad}}}' for bad in ('"1"', "1.5", "-1", "60001", "true")),
    ),
    "allowed_token_ids": ("1", "[]", '["a"]', "[-1]", "[49152]"),
    "bad_words": ("1", '"a"', '[""]', "[1]", json.dumps(["a"] * 1025)),
    "repeat_last_n": (*NOT_AN_INTEGER, "-2"),
    "samplers": ("1", "[1]", json.dumps(["a"] * 65)),
    "include_stop_str_in_output": ("1", '"true"'),
    "skip_special_tokens": ("1", '"true"'),
    "grammar": ("1", "[]", '"root ::= ("', '"no grammar"'),
    "json_schema": ("1", "[]", '"{"', '{"type": "strong"}'),
    "prompt_logprobs": (*NOT_AN_INTEGER, "-1", "21"),
    "return_token_ids": ("1", '"true"'),
    "return_tokens_as_token_ids": ("1", '"true"'),
    "request_id": ("1", '""', '"a b"', f'"{"a" * 129}"'),
    "timings_per_token": ("1", '"true"'),
    "t_max_predict_ms": (*NOT_AN_INTEGER, "-1"),
    "t_max_prompt_ms": (*NOT_AN_INTEGER, "-1"),
    "cache_salt": ("1", "[]", f'"{"a" * 257}"'),
    "user": ("1", "{}"),
    "service_class": ("1", "0", "[]", '""', '"urgent"', '"NORMAL"', '"flex"'),
    "service_tier": ("1", "[]", '""', '"normal"', '"background"'),
    "priority": (*NOT_AN_INTEGER, "-101", "101"),
    "best_of": (*NOT_AN_INTEGER, "0", "-1", "17"),
    "use_beam_search": ("1", '"true"', "[]"),
    "length_penalty": (*NOT_A_NUMBER, *HUGE, "-10.1", "10.1"),
    "structured_outputs": ("1", "[]", '{"regex": "("}', '{"choice": []}', '{"grammar": "start"}', '{"json": 1}'),
    "guided_json": ("1", "[]", '"{"', '{"type": "strong"}'),
    "guided_regex": ("1", '""', '"(a"', json.dumps("a" * 300_000)),
    "guided_choice": ("1", "[]", '[""]', "[1]"),
    "guided_grammar": ("1", '""', '"start"'),
    "early_stopping": ("1", '"true"', '""', '"always"', "[]"),
}
BAD_ONLY: dict[str, dict[str, tuple[str, ...]]] = {
    CHAT: {
        "messages": (
            *("null", "[]", '"Hi"', "{}", "[1]", "[null]", "[{}]", "[[]]"),
            '[{"role": "user"}, {"content": "Hi"}]',
            '[{"role": "a king", "content": "Hi"}]',
            '[{"role": "user", "content": 1}]',
            '[{"role": "user", "content": [1]}]',
            '[{"role": "user", "content": [{"text": "Hi"}]}]',
            '[{"role": "user", "content": [{"type": "text"}]}]',
            '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 1}}]}]',
            '[{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}]',
            '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "no"}}]}]',
            '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]',
            '[{"role": "assistant", "tool_calls": [{}]}]',
            json.dumps([{"role": "user", "content": "too long " * 3000}]),
        ),
        "max_tokens": ("0",),
        "max_completion_tokens": (*NOT_AN_INTEGER, "0", "-1"),
        "logprobs": ("1", '"true"', "[]"),
        "top_logprobs": (*NOT_AN_INTEGER, "-1", "21", "5"),
        "response_format": (
            *("1", "{}", '{"type": "xml"}', '{"type": "json_schema"}', '{"type": "json_schema", "json_schema": {}}'),
            '{"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strong"}}}',
            '{"type": "json_object", "schema": [1]}',
        ),
        "tools": ("1", "{}", '[{"type": "function", "function": {}}]'),
        "add_generation_prompt": ("1",),
        "continue_final_message": ("1", "true"),  # not allowed, because the last message of VALID is the user's
        "include_reasoning": ("1",),
        "functions": ('[{"name": "f"}]',),
        "modalities": ('"text"', '["text", "audio"]'),
    },
    COMPLETION: {
        "prompt": (
            *("null", "1", "true", "{}", "[]", '""', "[[]]", "[null]", "[true]", "[1.5]", "[-1]", "[49152]"),
            *("[[49152]]", '["a", 1]', '[1, "a"]', "[1, [1]]", "[[[1]]]", '[["a"]]', '["a", ""]'),
            f"[{2**31}]",
            json.dumps(["a"] * 257),
            json.dumps("too long " * 3000),
            json.dumps([1] * 2048),
        ),
        "logprobs": (*NOT_AN_INTEGER, "-1", "21"),
        "echo": ("1", '"true"'),
        "suffix": ("1", '"the end"'),
        "response_format": ("1", '{"type": "xml"}'),
        "truncate_prompt_tokens": (*NOT_AN_INTEGER, "0", "-2"),
        "truncation_side": ("1", '"top"'),
    },
}
TABLE = [
    (path, name, value)
    for path in (CHAT, COMPLETION)
    for table in (BAD, BAD_ONLY[path])
    for name, values in table.items()
    for value in values
]


@pytest.fixture(scope="module")
def http(hash_server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hash_server.url, timeout=None) as http:  # noqa: S113
        yield http


@pytest.fixture(scope="module")
def short_replies(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[httpx.Client]:
    """An HTTP client of a server whose replies are short by default."""
    engine, _ = controlled_engine(tokenizer.vocab_size, context=128)
    with (
        LiveServer("hash", engine, tokenizer, renderer) as server,
        httpx.Client(base_url=server.url, timeout=None) as http,  # noqa: S113
    ):
        yield http
    engine.assert_empty()


def post(http: httpx.Client, path: str, body: bytes | str) -> httpx.Response:
    return http.post(path, content=body, headers={"content-type": "application/json"})


def body_with(path: str, name: str, value: str) -> str:
    """Return a valid body in which `field` has the JSON text `value`."""
    others = {key: json.dumps(kept) for key, kept in VALID[path].items() if key != name}
    return "{" + ", ".join(f'"{key}": {text}' for key, text in {**others, name: value}.items()) + "}"


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error of a response. It must have OpenAI's format."""
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    too_long = {"n_prompt_tokens", "n_ctx"} if error["code"] == "context_length_exceeded" else set()
    assert error.keys() - too_long == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return error


def test_bodies_of_the_tables_are_valid_before_a_field_is_changed(http: httpx.Client) -> None:
    for path, body in VALID.items():
        assert post(http, path, json.dumps(body)).status_code == 200


@pytest.mark.parametrize(("path", "name"), sorted({(path, name) for path, name, _ in TABLE}))
def test_error_names_the_invalid_field(http: httpx.Client, path: str, name: str) -> None:
    for value in [value for p, n, value in TABLE if (p, n) == (path, name)]:
        response = post(http, path, body_with(path, name, value))
        assert response.status_code in (400, 404), (value, response.text)
        assert name in error_of(response)["param"], (value, response.text)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_error_names_the_missing_field(http: httpx.Client, path: str) -> None:
    for name in VALID[path].keys() - {"max_tokens", "model"}:
        response = post(http, path, json.dumps({key: value for key, value in VALID[path].items() if key != name}))
        assert (response.status_code, error_of(response)["param"]) == (400, name)


@pytest.mark.parametrize("name", ["", "urgent", "NORMAL", "interactive, normal", "0"])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_error_names_the_invalid_header(http: httpx.Client, path: str, name: str) -> None:
    response = http.post(path, json={**VALID[path], "service_class": "normal"}, headers={"X-Ingle-Class": name})
    assert (response.status_code, error_of(response)["param"]) == (400, "X-Ingle-Class")
    assert "interactive" in error_of(response)["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_known_fields_without_effect_are_accepted(http: httpx.Client, path: str) -> None:
    for field in ({"store": False}, {"service_tier": "auto"}, {"service_tier": None}, {"priority": None}):
        response = post(http, path, json.dumps({**VALID[path], **field}))
        assert response.status_code == 200, (field, response.text)


def test_error_for_several_invalid_fields_names_any_of_them(http: httpx.Client) -> None:
    """The error may name any of the invalid fields."""
    chance = random.Random(3)
    for _ in range(600):
        path = chance.choice((CHAT, COMPLETION))
        wrong = chance.sample([(name, value) for p, name, value in TABLE if p == path], chance.randint(2, 5))
        fields = {key: json.dumps(value) for key, value in VALID[path].items()} | dict(wrong)
        response = post(http, path, "{" + ", ".join(f'"{key}": {text}' for key, text in fields.items()) + "}")
        assert response.status_code in (400, 404), (fields, response.text)
        named = error_of(response)["param"]
        assert any(name in named for name in dict(wrong)), (fields, response.text)


def test_random_bytes_in_a_body_never_cause_a_server_error(short_replies: httpx.Client) -> None:
    chance = random.Random(4)
    for _ in range(500):
        path = chance.choice((CHAT, COMPLETION))
        body = bytearray(json.dumps(VALID[path]).encode())
        for _ in range(chance.randint(1, 4)):
            index = chance.randrange(len(body))
            body[index : index + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
        response = post(short_replies, path, bytes(body))
        assert response.status_code < 500, (bytes(body), response.text)
        if response.status_code != 200:
            error_of(response)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"null", b"1", b'"Hi"', b"[]", b"{", b'{"model": "hash"', b"\xff\xfe", b"\x00", b"{}x"),
        b'{"model": NaN}',
        b'{"model": "\\ud800", "prompt": "Hi"}',
        b'{"model": "hash", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "hash", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "hash", "messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}',
        b'{"model": "hash", "messages": [{"role": "user", "content": "Hi"}], "temperature": -Infinity}',
        b'{"model": "hash", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "hash", "tool_choice": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"model": "hash", "tools": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}",
        b"[" * 1_000_000,
    ],
)
def test_body_that_is_not_a_json_object_is_refused(http: httpx.Client, body: bytes) -> None:
    for path in (CHAT, COMPLETION):
        response = post(http, path, body)
        assert response.status_code == 400
        error_of(response)


def test_unusual_but_valid_text_is_accepted(http: httpx.Client) -> None:
    for text in ("\0", "\0" * 100, "\u202e", "<|im_end|>", "{{ 7 * 7 }}", "\U0010ffff", " ", "\ufffe"):
        for path, field in ((CHAT, "messages"), (COMPLETION, "prompt")):
            value = [{"role": "user", "content": text}] if path == CHAT else text
            response = post(http, path, json.dumps({**VALID[path], field: value}))
            assert response.status_code == 200, (text, response.text)


DEFAULT_TYPES = (None, "text/plain", "application/x-www-form-urlencoded")


def post_as(http: httpx.Client, media_type: str | None, **headers: str) -> httpx.Response:
    typed = headers if media_type is None else {**headers, "content-type": media_type}
    return http.post(CHAT, content=json.dumps(VALID[CHAT]).encode(), headers=typed)


@pytest.mark.parametrize("media_type", DEFAULT_TYPES)
def test_clients_may_omit_the_content_type(http: httpx.Client, media_type: str | None) -> None:
    assert post_as(http, media_type).status_code == 200


@pytest.mark.parametrize("media_type", [*DEFAULT_TYPES, "application/json"])
def test_web_pages_must_send_json(http: httpx.Client, media_type: str | None) -> None:
    response = post_as(http, media_type, origin=str(http.base_url).rstrip("/"))
    assert response.status_code == (200 if media_type == "application/json" else 415)


@pytest.mark.parametrize("media_type", ["multipart/form-data", "application/jsonp", "application/xml"])
def test_other_media_types_are_refused(http: httpx.Client, media_type: str) -> None:
    response = post_as(http, media_type)
    assert response.status_code == 415
    error_of(response)


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br", 415), ("Identity", 200), ("", 200)])
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_compressed_body_is_refused_by_its_encoding(http: httpx.Client, path: str, encoding: str, status: int) -> None:
    body = json.dumps(VALID[CHAT] if path == CHAT else {"content": "Hi"}).encode()
    headers = {"content-type": "application/json", "content-encoding": encoding}
    response = http.post(path, content=gzip.compress(body) if encoding == "gzip" else body, headers=headers)
    assert response.status_code == status
    if status == 415:
        assert f"Content-Encoding is '{encoding}'" in response.json()["error"]["message"]
        assert response.headers["accept-encoding"] == "identity"


def test_json_with_a_charset_is_accepted(http: httpx.Client) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post(CHAT, content=json.dumps(VALID[CHAT]).encode(), headers=headers).status_code == 200


def test_body_over_the_limit_is_refused(http: httpx.Client) -> None:
    body = json.dumps({**VALID[CHAT], "ignored": "x" * MAX_BODY_BYTES}).encode()
    response = post(http, CHAT, body)
    assert response.status_code == 413
    error_of(response)
    response = http.post(CHAT, content=iter([body]), headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_prompt_longer_than_the_context_is_refused_with_the_numbers(http: httpx.Client) -> None:
    response = post(http, COMPLETION, json.dumps({**VALID[COMPLETION], "prompt": [5] * 3000}))
    error = error_of(response)
    assert response.status_code == 400
    expected = "This model's maximum context length is 2048 tokens. However, your prompt resulted in 3000 tokens, so "
    assert error["message"].startswith(expected)
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (3000, 2048)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"


@pytest.mark.parametrize("field", [{"num_ctx": 40}, {"options": {"num_ctx": 40, "mirostat": 1}}])
def test_num_ctx_limits_prompt_and_reply_together(http: httpx.Client, field: dict[str, Any]) -> None:
    body = {**VALID[COMPLETION], "max_tokens": 100, "ignore_eos": True, **field}
    reply = post(http, COMPLETION, json.dumps({**body, "prompt": [[5] * 30, [5] * 39]})).json()
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length"] * 2
    assert reply["usage"]["completion_tokens"] == 10 + 1
    refused = post(http, COMPLETION, json.dumps({**body, "prompt": [5] * 1000}))
    error = error_of(refused)
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert (
        "length is 40 tokens. However, your prompt resulted in 1000 tokens, so the prompt is too long. "
        in error["message"]
    )
    assert "num_ctx" in error["message"]


def test_unknown_model_is_refused(http: httpx.Client) -> None:
    response = post(http, CHAT, json.dumps({**VALID[CHAT], "model": "gpt-5"}))
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    assert "'hash'" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("DELETE", "/v1/models/hash", 405),
        ("POST", "/v1/models", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("POST", "/metrics", 405),
    ],
)
def test_unknown_paths_and_methods_are_refused(http: httpx.Client, method: str, path: str, status: int) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    assert path in error_of(response)["message"]
    assert ("allow" in response.headers) == (status == 405)
