"""The Responses API through the real openai client: complete, streamed, stored, and continued responses."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from app.generation.conversation import Message
from app.generation.template import ChatTemplateRenderer
from app.models.residency.resident import State
from app.server.dialects.responses import background
from app.text.tokenizer import Tokenizer
from tests.app.server.dialects.openai.test_chat import client, expected_text
from tests.app.server.dialects.openai.test_embeddings import EmbeddingServer
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.loading_server import LoadingServer
from tests.app.server.scripted_server import ScriptedServer
from tests.support.processes import HANGING_SECONDS, until

QUESTION = "What is the capital of France?"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCRIPT = f"<think>\nThey ask.\n</think>\n\nI look.\n{CALL}\n{CALL}"


class Asker:
    """A client that sends requests to one server."""

    def __init__(self, server: LiveServer, api: openai.OpenAI) -> None:
        self.server = server
        self.api = api

    def __call__(self, **asked: Any) -> Response:
        reply: Response = self.api.responses.create(**self.given(asked))
        return reply

    def events(self, **asked: Any) -> list[ResponseStreamEvent]:
        with self.api.responses.create(**self.given(asked), stream=True) as stream:
            return list(stream)

    def given(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.server.service.name, "input": QUESTION, **asked}


class ScriptedAsker(Asker):
    server: ScriptedServer

    def says(self, text: str) -> int:
        """Make `text` the text of all further replies, and return its number of tokens."""
        return self.server.says(text)


@pytest.fixture(scope="module")
def ask(hash_server: LiveServer) -> Iterator[Asker]:
    with client(hash_server) as api:
        yield Asker(hash_server, api)


@pytest.fixture(scope="module")
def scripted(scripted_server: ScriptedServer) -> Iterator[ScriptedAsker]:
    with client(scripted_server) as api:
        yield ScriptedAsker(scripted_server, api)


def stable_fields(response: Response) -> dict[str, Any]:
    """Return a response without the fields that differ between responses."""
    reported = response.model_dump(exclude={"id", "created_at", "completed_at", "usage", "store"})
    for item in reported["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return reported


def test_reply_equals_the_model_output(hash_server: LiveServer, ask: Asker) -> None:
    reply = ask(max_output_tokens=40, extra_body={"ignore_eos": True})
    assert reply.output_text == expected_text(hash_server, QUESTION, 40)
    assert (reply.status, reply.error) == ("incomplete", None)
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in reply.output] == ["incomplete"]  # type: ignore[union-attr]
    assert reply.usage is not None
    prompt = hash_server.call(hash_server.service.encode([Message("user", QUESTION)]))
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(prompt), 40)
    assert reply.usage.total_tokens == len(prompt) + 40


def test_events_are_ordered_and_agree_with_the_whole_reply(scripted: ScriptedAsker) -> None:
    scripted.says(SCRIPT)
    events = scripted.events(tools=[WEATHER])
    whole = scripted(tools=[WEATHER])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for kind, before in zip(kinds, ["", *kinds[:-1]], strict=True) if kind != before]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    part = ("output_item.added", "content_part.added"), ("content_part.done", "output_item.done")
    thoughts = [*part[0], "reasoning_text.delta", "reasoning_text.done", *part[1]]
    text = [*part[0], "output_text.delta", "output_text.done", *part[1]]
    assert once == ["created", "in_progress", *thoughts, *text, *call, *call, "completed"]
    last = events[-1]
    assert last.type == "response.completed"
    assert stable_fields(last.response) == stable_fields(whole)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output_text == "I look."


def test_deltas_add_up_to_their_items(scripted: ScriptedAsker) -> None:
    scripted.says(SCRIPT)
    texts: dict[str, str] = {}
    done: dict[str, Any] = {}
    for event in scripted.events(tools=[WEATHER], reasoning={"summary": "auto"}):
        if event.type.endswith(".delta"):
            item_id = event.item_id  # type: ignore[union-attr]
            texts[item_id] = texts.get(item_id, "") + event.delta  # type: ignore[union-attr, operator]
        elif event.type == "response.output_item.done":
            done[str(event.item.id)] = event.item
    assert texts.keys() == done.keys()
    for item_id, item in done.items():
        whole = {"message": lambda it: it.content[0].text, "reasoning": lambda it: it.summary[0].text}
        assert texts[item_id] == whole.get(item.type, lambda it: it.arguments)(item), item
    assert [item.content for item in done.values() if item.type == "reasoning"] == [None]


def test_second_turn_finds_the_first_one_cached(scripted: ScriptedAsker) -> None:
    generated = scripted.says(f"I look.\n{CALL}\n{CALL}")  # the template removes the reasoning of earlier replies
    first = scripted(input="A question of its own. " * 30, tools=[WEATHER], instructions="Be brief.")
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "22"}
        for item in first.output
        if item.type == "function_call"
    ]
    scripted.says("Done.")
    asked: dict[str, Any] = {"tools": [WEATHER], "instructions": "Be brief.", "previous_response_id": first.id}
    second = scripted(input=results, **asked)
    third = scripted(input="And?", **(asked | {"previous_response_id": second.id}))
    assert first.usage and second.usage and third.usage  # noqa: PT018
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens + generated - 20
    assert third.usage.input_tokens_details.cached_tokens >= second.usage.input_tokens - 20
    assert third.previous_response_id == second.id


def test_sending_the_items_equals_previous_response_id(scripted: ScriptedAsker) -> None:
    scripted.says(SCRIPT)
    first = scripted(tools=[WEATHER])
    result = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "22"}]}
    scripted.says("Done.")
    items: list[Any] = [{"role": "user", "content": QUESTION}, *first.model_dump()["output"], result]
    by_items = scripted(tools=[WEATHER], input=items)
    by_id = scripted(tools=[WEATHER], input=[result], previous_response_id=first.id)
    assert by_items.usage and by_id.usage  # noqa: PT018
    assert by_items.usage.input_tokens == by_id.usage.input_tokens


def test_stored_response_equals_the_reply(ask: Asker) -> None:
    asked: dict[str, Any] = {"max_output_tokens": 4, "metadata": {"a": "b"}, "seed": 1}
    api = ask.api
    reported = ask(extra_body={"seed": asked.pop("seed")}, **asked)
    assert api.responses.retrieve(reported.id) == reported
    [item] = list(api.responses.input_items.list(reported.id))
    assert item.model_dump()["content"][0]["text"] == QUESTION
    api.responses.delete(reported.id)
    for call in (api.responses.retrieve, api.responses.delete, api.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(reported.id)
    with pytest.raises(openai.BadRequestError) as missing:
        ask(previous_response_id=reported.id)
    assert (missing.value.code, missing.value.param) == ("previous_response_not_found", "previous_response_id")


def test_deleting_a_response_deletes_only_its_own_blocks(ask: Asker) -> None:
    first = ask(input="One of its kind. " * 20, max_output_tokens=8)
    asked: dict[str, Any] = {"previous_response_id": first.id, "input": "Go on. " * 40, "max_output_tokens": 8}
    second = ask(**asked)
    ask.api.responses.delete(second.id)
    again = ask(**asked)
    assert first.usage is not None
    for one in (second, again):
        assert one.usage is not None
        cached = one.usage.input_tokens_details.cached_tokens
        assert first.usage.input_tokens - 16 <= cached <= first.usage.total_tokens


def test_response_with_store_false_is_not_stored(ask: Asker) -> None:
    reported = ask(max_output_tokens=2, store=False)
    assert reported.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        ask.api.responses.retrieve(reported.id)


def test_input_items_are_paginated(ask: Asker) -> None:
    items: list[Any] = [{"role": "user", "content": f"{number}"} for number in range(5)]
    reported = ask(input=items, max_output_tokens=1)
    api = ask.api
    listed = list(api.responses.input_items.list(reported.id, limit=2, order="asc"))
    assert [item.model_dump()["content"][0]["text"] for item in listed] == [*"01234"]
    newest = api.responses.input_items.list(reported.id, limit=1).data
    assert [item.model_dump()["content"][0]["text"] for item in newest] == ["4"]


def when_ended(api: openai.OpenAI, response_id: str) -> Response:
    deadline = time.monotonic() + HANGING_SECONDS
    while (found := api.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline, "the response never ended"
    return found


def test_background_response_can_be_streamed_and_resumed(scripted: ScriptedAsker) -> None:
    scripted.says("word " * 50)
    api = scripted.api
    with scripted.server.runner.held() as steps:
        with api.responses.create(**scripted.given({}), background=True, stream=True) as stream:
            events = iter(stream)
            first = [next(events), next(events)]
            steps.release(3)
            first.append(next(events))
        response_id = first[0].response.id
        # the response continues although the client has disconnected
        assert api.responses.retrieve(response_id).status == "in_progress"
        steps.release(1000)
    assert [event.type for event in first] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.response.status for event in first] == ["queued", "queued", "in_progress"]
    ended = when_ended(api, response_id)
    with api.responses.retrieve(response_id, stream=True, starting_after=first[-1].sequence_number) as resumed:
        rest = list(resumed)
    assert [event.sequence_number for event in rest] == list(range(3, 3 + len(rest)))
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.output_text == ended.output_text == "word " * 50
    kept = scripted(max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="no longer stored"):
        api.responses.retrieve(kept.id, stream=True)


def test_failed_background_response_is_reported_to_followers(scripted: ScriptedAsker) -> None:
    scripted.server.runner.failures = 1
    with scripted.api.responses.create(**scripted.given({}), background=True, stream=True) as stream:
        types = [event.type for event in stream]
    assert types[:2] == ["response.created", "response.queued"]
    assert types[-1] == "response.failed"


def test_reply_has_the_requested_model_name(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    engine, _ = controlled_engine(tokenizer.vocab_size, context=256)
    with LiveServer("hash", engine, tokenizer, renderer, aliases={"gpt-*": "*"}) as server, client(server) as api:
        assert api.responses.create(model="gpt-9", input="Hi", max_output_tokens=1).model == "gpt-9"
        assert api.responses.create(model="", input="Hi", max_output_tokens=1).model == "hash"


def test_compacted_conversation_can_be_continued(scripted: ScriptedAsker) -> None:
    scripted.says("They speak of Rome.")
    items: list[Any] = [
        {"role": "user", "content": "Where is the Colosseum?"},
        {"role": "assistant", "content": "In Rome."},
        {"role": "user", "content": "And the Forum?"},
    ]
    compacted: Any = scripted.api.responses.with_raw_response.compact(
        model="scripted", input=items
    ).http_response.json()
    *messages, item = compacted["output"]
    assert [one["content"][0]["text"] for one in messages] == ["Where is the Colosseum?", "And the Forum?"]
    assert item["type"] == "compaction"
    assert compacted["usage"]["input_tokens"] > 0
    scripted.says("Yes.")
    reported = scripted(input=[*messages, item, {"role": "user", "content": "Is it old?"}])
    assert reported.output_text == "Yes."
    with pytest.raises(openai.BadRequestError, match="another server"):
        scripted(input=[{"type": "compaction", "encrypted_content": "gAAAAA=="}])
    with pytest.raises(openai.NotFoundError):
        scripted.api.responses.compact(model="gpt-9", input=items)


def test_background_response_ends_or_can_be_canceled(scripted: ScriptedAsker) -> None:
    scripted.says("word " * 200)
    api = scripted.api
    with scripted.server.runner.held() as steps:
        begun, other = (scripted(background=True) for _ in range(2))
        assert (begun.status, begun.background) == ("queued", True)
        assert api.responses.retrieve(begun.id).status in ("queued", "in_progress")
        cancelled = api.responses.cancel(begun.id)
        assert cancelled.status == api.responses.cancel(begun.id).status == "cancelled"
        steps.release(1000)
    ended = when_ended(api, other.id)
    assert (ended.status, ended.output_text.split()) == ("completed", ["word"] * 200)
    with pytest.raises(openai.BadRequestError):
        scripted(background=True, store=False)
    with pytest.raises(openai.BadRequestError, match="Only background responses"):
        api.responses.cancel(scripted(max_output_tokens=1).id)


def test_background_responses_over_the_limit_get_429(scripted: ScriptedAsker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_RUNNING", 1)
    scripted.says("word " * 200)
    with scripted.server.runner.held() as steps:
        begun = scripted(background=True)
        with pytest.raises(openai.RateLimitError, match="1 background responses are running"):
            scripted(background=True)
        steps.release(1000)
    assert when_ended(scripted.api, begun.id).status == "completed"


def test_error_during_generation_gives_a_failed_response(scripted: ScriptedAsker) -> None:
    scripted.says("word " * 200)
    given: dict[str, Any] = {"model": "scripted", "input": QUESTION}
    api = scripted.api
    with scripted.server.runner.held() as steps:
        steps.release(3)
        with api.responses.create(**given, stream=True) as stream:
            events = iter(stream)
            heard = [next(events)]
            scripted.server.runner.failures = 1
            steps.release(1000)
            heard += events
    assert [event.type for event in heard][-2:] == ["response.failed", "error"]
    failed = heard[-2]
    assert failed.type == "response.failed"
    assert failed.response.error is not None
    assert [event.sequence_number for event in heard] == list(range(len(heard)))


def test_empty_input_gives_an_empty_response(ask: Asker) -> None:
    nothing: tuple[str | list[Any] | None, ...] = ("", [], None)
    for empty in nothing:
        reply = ask(input=empty, instructions="Be brief.")
        assert (reply.status, reply.output) == ("completed", [])


def test_input_tokens_are_counted_without_generating(scripted: ScriptedAsker) -> None:
    scripted.says("Hello")
    asked: dict[str, Any] = {"tools": [WEATHER], "instructions": "Be brief."}
    used = scripted(**asked).usage
    counted = scripted.api.responses.input_tokens.count(**scripted.given(asked))
    assert used is not None
    assert counted.input_tokens == used.input_tokens


def test_embedding_model_refuses_to_generate() -> None:
    with EmbeddingServer() as server, client(server) as api, pytest.raises(openai.BadRequestError, match="no text"):
        api.responses.create(model="digest", input=QUESTION)


def test_logprobs_cover_every_token_of_the_text(scripted: ScriptedAsker) -> None:
    scripted.says("I look.")
    reply = scripted(include=["message.output_text.logprobs"], top_logprobs=0)
    part = reply.output[-1].content[0]  # type: ignore[union-attr, index]
    assert "".join(token.token for token in part.logprobs or ()) == "I look.<|im_end|>"  # type: ignore[union-attr]
    deltas = [event for event in scripted.events(top_logprobs=1) if event.type.endswith("text.delta")]
    assert "".join(it.token for event in deltas for it in event.logprobs) == "I look.<|im_end|>"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("asked", "parameter"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0]"),
        ({"input": ["a"]}, "input[0]"),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_audio"}]}]},
            "input[0]",
        ),
        ({"input": [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": "msg_1"}]}, "input[1]"),
        ({"input": [{"type": "message", "content": "Hi"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "1", "arguments": "{"}]}, "input[0]"),
        ({"input": "long " * 3000}, "input"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 1}}}, "text.format.schema"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
    ],
)
def test_error_names_the_invalid_field(scripted: ScriptedAsker, asked: dict[str, Any], parameter: str) -> None:
    scripted.says("Hello")
    with pytest.raises(openai.BadRequestError) as caught:
        scripted(**asked)
    assert str(caught.value.param).startswith(parameter)


def test_concurrent_responses_equal_single_responses(hash_server: LiveServer, ask: Asker) -> None:
    questions = [f"Question {number}" for number in range(6)]

    async def ask_all() -> list[Response]:
        url = f"{hash_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
            given: dict[str, Any] = {"model": "hash", "max_output_tokens": 20, "extra_body": {"ignore_eos": True}}
            return await asyncio.gather(*(api.responses.create(input=one, **given) for one in questions))

    replies = asyncio.run(ask_all())
    assert [one.output_text for one in replies] == [expected_text(hash_server, one, 20) for one in questions]


# -- the default model


class Capital(pydantic.BaseModel):
    city: str
    inhabitants: int


def test_default_model_answers_in_every_format(smollm2_server: LiveServer) -> None:
    asked: dict[str, Any] = {"model": "smollm2:135m", "input": QUESTION, "temperature": 0}
    with client(smollm2_server) as api:
        with api.responses.stream(**asked, max_output_tokens=10) as stream:
            stream.until_done()
        assert "Paris" in api.responses.create(**asked, max_output_tokens=10).output_text
        parsed = api.responses.parse(**asked, text_format=Capital, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Capital)


def test_deleting_a_response_loads_only_its_own_model(loading_server: LoadingServer) -> None:
    with httpx.Client(base_url=loading_server.url, trust_env=False, timeout=60) as http:
        body = {"model": "alias", "input": "Hi", "max_output_tokens": 2, "ttl": 0}
        created = http.post("/v1/responses", json=body).json()
        until(lambda: loading_server.residents.of("b").state is State.UNLOADED)
        assert http.delete(f"/v1/responses/{created['id']}").json()["deleted"]
    assert loading_server.loader.loads == ["b", "b"]
