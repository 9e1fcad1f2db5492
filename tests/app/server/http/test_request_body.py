"""Limits of large request bodies: the number of values, counted outside of strings, and the nesting."""

import json
import random
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from app.server.http import request_body
from app.server.http.errors import InvalidRequest
from app.server.http.request_body import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, _without_strings, decode_bounded


class Body(Struct):
    text: str = ""


decoder = msgspec.json.Decoder(Body)
TEXT = '{[,]}"\\\n\x00é\U0001f600'


def random_text(chance: random.Random) -> str:
    return "".join(chance.choice((*TEXT, "word", "\\\\", '\\"')) for _ in range(chance.randrange(9)))


def test_strings_are_removed_from_random_json() -> None:
    """The expected result is the same JSON text with all strings empty."""
    chance = random.Random(5)

    def value(depth: int, text: str | None) -> Any:
        kind = chance.random()
        if depth > 3 or kind < 0.5:
            return random_text(chance) if text is None else text
        return [value(depth + 1, text) for _ in range(chance.randrange(4))]

    for number in range(300):
        chance = random.Random(number)
        body = json.dumps(value(0, None), ensure_ascii=bool(number % 2)).encode()
        empty = json.dumps(_emptied(json.loads(body))).encode()
        assert _without_strings(body) == empty.replace(b'"', b"")


def _emptied(value: Any) -> Any:
    return "" if isinstance(value, str) else [_emptied(item) for item in value]


@pytest.mark.parametrize("text", ["{" * 40_000, ",[" * 200_000, '\\"' * 100_000, "\\" * 99_999, '"' * 100_000])
def test_string_may_contain_any_characters(text: str) -> None:
    assert decode_bounded(json.dumps({"text": text}).encode(), decoder).text == text


@pytest.mark.parametrize(
    "body",
    [
        b'{"x": [' + b"[]," * MAX_CONTAINERS + b"[]]}",
        b'{"x": [' + b"{}," * MAX_CONTAINERS + b"1]}",
        b"[" * (MAX_CONTAINERS + 1),
        b"[]" * (MAX_CONTAINERS + 1),
        b'{"x": [' + b"1," * (MAX_VALUES + 1) + b"1]}",
        b'{"x": [' + b'"",' * (MAX_VALUES + 1) + b'""]}',
        b'"' * (2 * MAX_VALUES + 1) + b"," * (MAX_VALUES + 1),
        b'{"text": "\\\\", "x": [' + b"[]," * MAX_CONTAINERS + b"[]]}",
    ],
)
def test_too_many_values_are_refused_before_decoding(body: bytes) -> None:
    class Never:
        def decode(self, body: bytes) -> Body:
            raise AssertionError("the body was decoded")

    with pytest.raises(InvalidRequest, match="more than"):
        decode_bounded(body, Never())


@pytest.mark.parametrize(("begin", "end"), [(b"[", b"]"), (b'{"a":', b"}"), (b'{"text": "}]}]}]", "x":', b"}")])
def test_nesting_is_accepted_up_to_the_limit(begin: bytes, end: bytes) -> None:
    def nested(levels: int) -> bytes:
        return b'{"x":' + begin * (levels - 1) + b"1" + end * (levels - 1) + b"}"

    decode_bounded(nested(MAX_DEPTH), decoder)
    with pytest.raises(InvalidRequest, match="levels"):
        decode_bounded(nested(MAX_DEPTH + 1), decoder)


def test_values_are_accepted_up_to_the_limit() -> None:
    body = b'{"text": "a", "x": [' + b"[]," * (MAX_CONTAINERS - 3) + b"[]]}"
    assert decode_bounded(body, decoder).text == "a"
    assert len(body) < request_body.MAX_BODY_BYTES
