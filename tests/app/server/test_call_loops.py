"""The openai client completes a loop of tool calls with the templates and the formats of gpt-oss and Gemma 4."""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from app.generation.template import ChatTemplateRenderer
from app.text.gguf_tokenizer import from_gguf
from app.text.tokenizer import Tokenizer
from quant.gguf import GGUFFile
from tests.app.server.dialects.openai.test_chat import client
from tests.app.server.scripted_server import ScriptedServer

CITIES = ("Rome", "Oslo", "Lima")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS}}
QUESTION = "Where is it warmest?"


@dataclass(frozen=True)
class Format:
    """The texts that a model writes, with {city} and {days} to fill in."""

    template: str
    call: str
    call_end: str
    answer: str
    answer_end: str
    # whether the template writes calls as the model does; otherwise, only the reasoning of the last reply is cached
    repeats_calls: bool = True
    vocabulary: str = ""  # a file of llama.cpp; empty: the default model's vocabulary


HARMONY = Format(
    "openai-gpt-oss-120b",
    "<|channel|>analysis<|message|>Now {city}.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
    ' <|constrain|>json<|message|>{{"city":"{city}","days":{days}}}<|call|>',
    "<|im_end|>",
    "<|channel|>analysis<|message|>I know all.<|end|><|start|>assistant<|channel|>final<|message|>In Lima.",
    "<|im_end|>",
    repeats_calls=False,  # the recipient of a call is before its channel
)
GEMMA4 = Format(
    "google-gemma-4-31B-it",
    "<|channel>thought\nNow {city}.\n<channel|>"
    '<|tool_call>call:get_weather{{city:<|"|>{city}<|"|>,days:{days}}}<tool_call|>',
    "<|tool_response>",
    "<|channel>thought\nI know all.\n<channel|>In Lima.",
    "<turn|>",
    vocabulary="ggml-vocab-gemma-4.gguf",
)


@pytest.fixture(params=[HARMONY, GEMMA4], ids=["gpt-oss", "Gemma 4"])
def spoken(request: pytest.FixtureRequest) -> Format:
    chosen: Format = request.param
    return chosen


@pytest.fixture
def server(
    spoken: Format, llama_cpp_models: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> Iterator[ScriptedServer]:
    model = copy.copy(tokenizer)
    if spoken.vocabulary:
        with GGUFFile(llama_cpp_models / spoken.vocabulary) as file:
            model = from_gguf(file.metadata)
    model.chat_template = (llama_cpp_models / "templates" / f"{spoken.template}.jinja").read_text(encoding="utf-8")
    with ScriptedServer(model, renderer) as server:
        yield server


def test_loop_of_three_calls_is_completed(spoken: Format, server: ScriptedServer) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: dict[str, Any] = {"model": server.service.name, "messages": messages, "tools": [TOOL], "max_tokens": 200}
    length = 0
    with client(server) as api:
        for days, city in enumerate(CITIES, 1):
            server.says(spoken.call.format(city=city, days=days), spoken.call_end)
            reply: ChatCompletion = api.chat.completions.create(**asked)
            [choice], usage = reply.choices, reply.usage
            [call] = choice.message.tool_calls or []
            assert choice.finish_reason == "tool_calls"
            assert call.type == "function"
            assert call.function.name == "get_weather"
            assert json.loads(call.function.arguments) == {"city": city, "days": days}
            assert (choice.message.model_extra or {})["reasoning"] == f"Now {city}."
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert (usage.prompt_tokens_details.cached_tokens or 0) >= length - 16  # the last block was not full
            length = usage.prompt_tokens + (usage.completion_tokens - 1 if spoken.repeats_calls else 0)
            messages += [choice.message.model_dump(exclude_none=True)]
            messages += [{"role": "tool", "tool_call_id": call.id, "content": f"{20 + days} degrees"}]
        server.says(spoken.answer, spoken.answer_end)
        last: ChatCompletion = api.chat.completions.create(**asked)
    [choice] = last.choices
    assert (choice.message.content, choice.finish_reason) == ("In Lima.", "stop")
    assert (choice.message.model_extra or {})["reasoning"] == "I know all."
