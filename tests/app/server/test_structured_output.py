"""Structured output through the real openai client, from a real model that nothing but its grammar holds in check."""

import asyncio
import json
import random
import re
from typing import Any

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


def test_random_schemas_are_kept_at_temperature_1(smollm2_server: LiveServer, schemas: int) -> None:
    drawn = [random_schema(random.Random()) for _ in range(schemas)]

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
    assert finished >= 0.95 * len(drawn)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_keeps_to_it_too(smollm2_server: LiveServer, temperature: float) -> None:
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
    ],
)
def test_all_ways_of_asking(smollm2_server: LiveServer, extra: dict[str, Any], pattern: str) -> None:
    with client(smollm2_server) as api:
        reply = api.chat.completions.create(
            model="smollm2:135m", messages=QUESTION, max_tokens=60, n=extra.pop("n", 1), extra_body=extra
        )
        for choice in reply.choices:
            assert re.fullmatch(pattern, choice.message.content or "")
            assert choice.finish_reason == "stop"


def test_completions_keep_to_it(smollm2_server: LiveServer) -> None:
    with client(smollm2_server) as api:
        reply = api.completions.create(
            model="smollm2:135m", prompt="One plus two is", extra_body={"guided_regex": " [0-9]"}, max_tokens=10
        )
    assert re.fullmatch(" [0-9]", reply.choices[0].text)


def test_any_object(smollm2_server: LiveServer) -> None:
    with client(smollm2_server) as api:
        reply = api.chat.completions.create(
            model="smollm2:135m", messages=QUESTION, response_format={"type": "json_object"}, temperature=0
        )
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"response_format": {"type": "json_schema"}}, FORMAT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, f"{FORMAT}.schema"),
        ({"response_format": strict({"items": {"type": "strong"}})}, f"{FORMAT}.schema.items"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "use_beam_search": True}, "grammar"),
    ],
)  # fmt: skip
def test_a_bad_one_is_refused_with_its_place(smollm2_server: LiveServer, body: dict[str, Any], place: str) -> None:
    with client(smollm2_server) as api, pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(model="smollm2:135m", messages=QUESTION, extra_body=body)
    assert refused.value.param == place
