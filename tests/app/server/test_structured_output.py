"""Structured output through the real openai client. The model is real, and only the grammar constrains its replies."""

import asyncio
import json
import random
import re
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.app.server.live_server import LiveServer
from tests.app.server.random_schemas import random_schema

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Describe a shop in Paris as JSON."}]

FORMAT = "response_format.json_schema"


def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)


def strict(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_random_schemas_are_followed_at_temperature_1(
    smollm2_server: LiveServer, schemas: int, chance: random.Random
) -> None:
    drawn = [random_schema(chance) for _ in range(schemas)]

    async def answers() -> list[tuple[str | None, str]]:
        url = f"{smollm2_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as api:

            async def answer(schema: dict[str, Any]) -> tuple[str | None, str]:
                reply = await api.chat.completions.create(
                    model="smollm2:135m", messages=QUESTION, response_format=strict(schema), max_tokens=400
                )
                return reply.choices[0].message.content, reply.choices[0].finish_reason

            return await asyncio.gather(*map(answer, drawn))

    finished = 0
    for schema, (content, reason) in zip(drawn, asyncio.run(answers()), strict=True):
        if reason == "stop":
            finished += 1
            jsonschema.validate(json.loads(content or ""), schema)
    assert finished >= 0.95 * len(drawn) - 1  # one of a small number may reach max_tokens by chance


@pytest.mark.parametrize("temperature", [0, 1])
def test_streamed_reply_follows_the_schema(smollm2_server: LiveServer, temperature: float) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"]}
    schema["additionalProperties"] = False
    with (
        client(smollm2_server) as api,
        api.chat.completions.create(
            model="smollm2:135m",
            messages=QUESTION,
            response_format=strict(schema),
            temperature=temperature,
            stream=True,
            logprobs=True,
            top_logprobs=2,
        ) as stream,
    ):
        chunks = [choice for chunk in stream for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in chunks)
    jsonschema.validate(json.loads(text), schema)
    assert chunks[-1].finish_reason == "stop"
    reported = [token for choice in chunks if choice.logprobs for token in choice.logprobs.content or ()]
    assert "".join(token.token for token in reported).startswith(text)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}, "[0-9]{3}-[a-z]{2}"),
        ({"guided_regex": "(ab){2,5}"}, "(ab){2,5}"),
        ({"structured_outputs": {"choice": ["oui", "non"]}}, "oui|non"),
        ({"guided_choice": ["left", "right"], "n": 3}, "left|right"),
        ({"structured_outputs": {"grammar": 'start: ("x" | "y")~3'}}, "[xy]{3}"),
        ({"guided_json": '{"enum": [17]}'}, "17"),
        ({"structured_outputs": {"json": {"const": "é"}}}, '"(é|.u00[eE]9)"'),
        ({"response_format": {"type": "json_object", "schema": {"enum": [{"a": 1}]}}}, r'\{\s*"a":\s*1\s*\}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}}, "7"),
        ({"response_format": {"type": "json_schema", "schema": {"const": 8}}}, "8"),
        ({"guided_grammar": 'root ::= word "!" # word: a comment\nword ::= "x" | "y"'}, "[xy]!"),
        ({"structured_outputs": {"grammar": "root ::= [a-c]{3}"}}, "[a-c]{3}"),
        ({"structured_outputs": {"json": {"const": [1, 2]}, "disable_any_whitespace": True}}, r"\[1,2\]"),
        ({"structured_outputs": {"json": {"const": [1]}, "whitespace_pattern": "_"}}, r"\[_?1_?\]"),
        ({"structured_outputs": {"regex": "a", "backend": "xgrammar", "disable_fallback": True}}, "a"),
    ],
)
def test_every_structured_output_field_is_followed(
    smollm2_server: LiveServer, extra: dict[str, Any], pattern: str
) -> None:
    with client(smollm2_server) as api:
        reply = api.chat.completions.create(
            model="smollm2:135m", messages=QUESTION, max_tokens=60, n=extra.pop("n", 1), extra_body=extra
        )
        for choice in reply.choices:
            assert re.fullmatch(pattern, choice.message.content or "")
            assert choice.finish_reason == "stop"


def test_completions_follow_the_schema(smollm2_server: LiveServer) -> None:
    with client(smollm2_server) as api:
        reply = api.completions.create(
            model="smollm2:135m", prompt="One plus two is", extra_body={"guided_regex": " [0-9]"}, max_tokens=10
        )
    assert re.fullmatch(" [0-9]", reply.choices[0].text)


def test_json_object_format_gives_an_object(smollm2_server: LiveServer) -> None:
    with client(smollm2_server) as api:
        reply = api.chat.completions.create(
            model="smollm2:135m", messages=QUESTION, response_format={"type": "json_object"}, temperature=0
        )
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "json_schema"}}, FORMAT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, f"{FORMAT}.schema"),
        ({"response_format": {"type": "json_schema", "schema": None}}, FORMAT),
        ({"response_format": strict({"items": {"type": "strong"}})}, f"{FORMAT}.schema.items.type"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": True, "whitespace_pattern": "("}}, "structured_outputs.json"),
        ({"guided_grammar": "root ::= a\na ::= root"}, "guided_grammar"),
        ({"guided_json": {"$ref": "#"}}, "guided_json"),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex"),
        ({"response_format": strict({"type": "integer", "multipleOf": 99999999})}, f"{FORMAT}.schema.multipleOf"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "use_beam_search": True}, "grammar"),
    ],
)  # fmt: skip
def test_invalid_schema_is_refused_with_its_path(smollm2_server: LiveServer, body: dict[str, Any], field: str) -> None:
    with client(smollm2_server) as api, pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(model="smollm2:135m", messages=QUESTION, extra_body=body)
    assert refused.value.param == field


# Every field that accepts a schema: path, a function that makes the other fields, path of the schema, and a function
# that returns the reply's text.
Asked = dict[str, Any]
MESSAGES = [dict(QUESTION[0])]
SCHEMA_FIELDS: dict[str, tuple[str, Callable[[Asked], Asked], str, Callable[[Any], str]]] = {
    "json_schema": (
        "/v1/chat/completions",
        lambda schema: {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        },
        "response_format.json_schema.schema",
        lambda reply: reply["choices"][0]["message"]["content"],
    ),
    "guided_json": (
        "/v1/completions",
        lambda schema: {"prompt": "A shop as JSON:", "guided_json": schema},
        "guided_json",
        lambda reply: reply["choices"][0]["text"],
    ),
    "responses": (
        "/v1/responses",
        lambda schema: {
            "input": "A shop as JSON",
            "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
        },
        "text.format.schema",
        lambda reply: reply["output"][0]["content"][0]["text"],
    ),
    "messages": (
        "/v1/messages",
        lambda schema: {"messages": MESSAGES, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
        "output_config.format.schema",
        lambda reply: reply["content"][0]["text"],
    ),
    "format": (
        "/api/chat",
        lambda schema: {"messages": MESSAGES, "stream": False, "format": schema, "options": {"num_predict": 60}},
        "format",
        lambda reply: reply["message"]["content"],
    ),
    "llama.cpp": (
        "/completion",
        lambda schema: {"prompt": "A shop as JSON:", "json_schema": schema, "n_predict": 60},
        "json_schema",
        lambda reply: reply["content"],
    ),
}


def post(server: LiveServer, field: str, schema: Asked, **more: Any) -> httpx.Response:
    path, fields, _, _ = SCHEMA_FIELDS[field]
    asked = {"model": "smollm2:135m", "max_tokens": 60, "max_output_tokens": 60, "temperature": 1, **fields(schema)}
    return httpx.post(server.url + path, json=asked | more, timeout=120)


@pytest.mark.parametrize("field", SCHEMA_FIELDS)
def test_objects_have_only_the_members_of_the_schema(smollm2_server: LiveServer, field: str) -> None:
    schema = {"type": "object", "properties": {"result": {"enum": [1, 2]}}, "required": ["result"]}
    for _ in range(6):
        text = SCHEMA_FIELDS[field][3](post(smollm2_server, field, schema).json())
        assert json.loads(text) in ({"result": 1}, {"result": 2})


@pytest.mark.parametrize("field", SCHEMA_FIELDS)
def test_unsupported_keywords_are_refused_with_their_path(smollm2_server: LiveServer, field: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    refused = post(smollm2_server, field, schema)
    assert refused.status_code == 400
    assert (
        f"{SCHEMA_FIELDS[field][2]}.properties.a.uniqueItems: The keyword uniqueItems cannot be enforced"
        in refused.text
    )


WIDE = "wide ::= " + " | ".join(f"r{number}" for number in range(600))
WIDE += "".join(f'\nr{number} ::= wide? "y" wide?' for number in range(600))
# The mask for the position after the letters takes minutes to compute.
TOO_COMPLEX_LATER = f'root ::= [a-z ]{{90}} "q" wide\n{WIDE}'


def test_too_complex_grammar_fails_only_its_own_reply(smollm2_server: LiveServer) -> None:
    beside = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    bad = {"prompt": "abc", "max_tokens": 300, "guided_grammar": TOO_COMPLEX_LATER, "model": "smollm2:135m"}

    async def main() -> tuple[httpx.Response, httpx.Response, httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(base_url=smollm2_server.url, timeout=120) as client:
            alone = await client.post("/v1/completions", json=beside)
            good, whole, streamed = await asyncio.gather(
                *(client.post("/v1/completions", json=it) for it in (beside, bad, bad | {"stream": True}))
            )
            return alone, good, whole, streamed

    alone, good, whole, streamed = asyncio.run(main())
    assert good.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
    assert (whole.status_code, whole.json()["error"]["param"]) == (400, "guided_grammar")
    assert "too complex" in whole.json()["error"]["message"]
    assert streamed.status_code == 200
    *_, last = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert "too complex" in error["message"]
    assert error["type"] == "invalid_request_error"
