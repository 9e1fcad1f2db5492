"""Forced replies are well-formed: a real model without tool support runs with the templates of models that have it."""

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import msgspec
import pytest

from app.generation.events import TokenCounts
from app.generation.grammars import GrammarCompiler
from app.generation.service import ChatService
from app.generation.template import ChatTemplateRenderer
from app.generation.token_streams import TokenStreams
from app.server.dialects.openai.chat import ChatCompletionChunk, Choice, chunks, fold
from app.server.dialects.openai.chat_requests import ChatCompletionRequest
from app.server.dialects.openai.reports import Identity
from app.server.dialects.responses.output_items import CustomToolCall, FunctionCall
from app.server.dialects.responses.replies import ResponseReply
from app.server.dialects.responses.requests import ResponseRequest
from app.server.dialects.responses.response import Response
from app.server.dialects.responses.stored_responses import StoredResponses
from app.server.served_models import Served
from app.text.tokenizer import Tokenizer
from engine.core import Engine
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.request import PROGRAM

FAMILIES = (
    "Qwen-Qwen2.5-7B-Instruct", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "Qwen3-Coder",
    "meta-llama-Llama-3.1-8B-Instruct", "Mistral-Small-3.2-24B-Instruct-2506", "deepseek-ai-DeepSeek-V3.2",
    "google-gemma-4-31B-it", "openai-gpt-oss-120b", "GLM-4.6",
)  # fmt: skip
TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "San José", "<b>"]},
        "nights": {"type": "integer", "minimum": 1, "maximum": 30},
        "by": {"type": "array", "items": {"enum": ["train", "ship"]}, "minItems": 1, "maxItems": 2},
        "quiet": {"type": "boolean"},
    },
    "required": ["city", "nights", "by"],
    "additionalProperties": False,
}
CLOCK: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"book_trip": TRIP, "now": CLOCK}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ANSWER: dict[str, Any] = {"type": "object", "properties": {"sum": {"enum": [3, 4]}}, "required": ["sum"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER | {"additionalProperties": False}}}


ONE_CALL = {"parallel_tool_calls": False, "max_tokens": 400}


QUESTION = "I want to go to Rome."


class Templates:
    """Runs one model with any of many chat templates."""

    def __init__(
        self, load: Callable[[], Engine[Any]], folder: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer
    ) -> None:
        self._load = load
        self._folder = folder
        self.tokenizer = tokenizer
        self._renderer = renderer
        self._grammars = GrammarCompiler(tokenizer)

    def ask(self, template: str, **fields: Any) -> Choice:
        return asyncio.run(self._ask(template, fields))

    async def _ask(self, template: str, fields: dict[str, Any]) -> Choice:
        given = {"model": "", "messages": [{"role": "user", "content": QUESTION}], "temperature": 1}
        wanted = msgspec.convert(given | fields, ChatCompletionRequest)
        wanted.check()
        async with self._service(template) as service:
            return (
                await fold(each(chunks(service, wanted, Identity.new("chatcmpl", "m"), PROGRAM, TokenCounts())))
            ).choices[0]

    def respond(self, template: str, **fields: Any) -> Response:
        """Send a request to the Responses API and return the response."""
        return asyncio.run(self._respond(template, fields))

    async def _respond(self, template: str, fields: dict[str, Any]) -> Response:
        wanted = msgspec.convert({"model": "", "input": QUESTION, "temperature": 1} | fields, ResponseRequest)
        wanted.check()
        async with self._service(template) as service:
            reply = ResponseReply(Served(service, "m", "m"), wanted, PROGRAM, "", StoredResponses())
            await reply.run((), lambda _: None)
            return reply.writer.response

    @asynccontextmanager
    async def _service(self, template: str) -> AsyncIterator[ChatService]:
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.chat_template = (self._folder / f"{template}.jinja").read_text(encoding="utf-8")
        async with TokenStreams(self._load()) as streams:
            service = ChatService("smollm2:135m", tokenizer, streams, self._renderer)
            service.grammars = self._grammars
            yield service


async def each(batches: AsyncGenerator[list[ChatCompletionChunk]]) -> AsyncGenerator[ChatCompletionChunk]:
    async for batch in batches:
        for one in batch:
            yield one


@pytest.fixture(scope="module")
def templates(
    smollm2: Path, cpu_kernels: Path, llama_cpp_models: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> Templates:
    def load() -> Engine[Any]:
        with open_checkpoint(smollm2) as checkpoint:
            return load_engine(checkpoint, LoadOptions(context_length=1024, code_cache=cpu_kernels))

    return Templates(load, llama_cpp_models / "templates", tokenizer, renderer)


def check_calls(reply: Choice) -> None:
    assert not reply.message.content
    assert reply.finish_reason == "tool_calls"
    [call] = reply.message.tool_calls or []
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.share(1)
@pytest.mark.parametrize("template", FAMILIES)
@pytest.mark.parametrize("name", [None, "book_trip"])
def test_forced_calls_are_returned_as_calls(templates: Templates, template: str, name: str | None) -> None:
    choice = {"type": "function", "function": {"name": name}} if name else "required"
    reply = templates.ask(template, tools=TOOLS, tool_choice=choice, reasoning_effort="none", **ONE_CALL)
    check_calls(reply)
    assert name is None or name == (reply.message.tool_calls or [])[0].function.name


@pytest.mark.share(1)
@pytest.mark.parametrize(
    "template", ["Qwen-QwQ-32B", "Qwen3.5-4B", "deepseek-ai-DeepSeek-V3.2", "openai-gpt-oss-120b", "MiniMax-M2"]
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_reasoning_is_followed_by_a_schema_or_a_call(templates: Templates, template: str, choice: str) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}, "thinking_token_budget": 12}
    reply = templates.ask(template, **thinking, tools=TOOLS, tool_choice=choice, response_format=FORMAT, **ONE_CALL)
    if choice == "required" or reply.message.tool_calls:
        check_calls(reply)
    else:
        jsonschema.validate(json.loads(reply.message.content or ""), ANSWER)
        assert reply.finish_reason == "stop"
    thought = reply.message.reasoning_content or ""
    assert thought or template == "openai-gpt-oss-120b"  # this model may skip the reasoning
    assert len(templates.tokenizer.encode(thought)) <= 16


@pytest.mark.share(1)
@pytest.mark.parametrize("template", FAMILIES)
def test_forced_calls_are_items_of_a_response(templates: Templates, template: str) -> None:
    trip = {"type": "function", "name": "book_trip", "parameters": TRIP, "strict": True}
    note = {"type": "custom", "name": "note", "description": "Writes down"}
    asked: dict[str, Any] = {"tools": [trip, note], "parallel_tool_calls": False, "reasoning": {"effort": "none"}}
    response = templates.respond(template, **asked, tool_choice={"type": "function", "name": "book_trip"})
    [call] = response.output
    assert isinstance(call, FunctionCall)
    jsonschema.validate(json.loads(call.arguments), TRIP)
    several = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "note"}]}
    response = templates.respond(template, **asked, tool_choice=several, max_output_tokens=60)
    [written] = response.output
    assert isinstance(written, CustomToolCall)
    assert (written.name, written.status) == ("note", response.status)
