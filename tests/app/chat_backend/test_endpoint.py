"""Tests for a chat with a server other than Inglenook: requests, replies, and errors."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest

from app.chat_backend.client import TerminalClient
from app.chat_backend.endpoint import ChatEndpoint
from app.chat_backend.titles import extract_title, is_small
from app.client.http import ServerUnreachable
from app.history.chats import Chats
from app.history.messages import Messages
from app.settings.settings import Settings
from tests.app.chat_backend.flows import run_unsaved
from tests.support.fake_endpoint import FakeEndpoint
from tui.client import ClientError
from tui.engine_types import ModelInfo
from tui.types import (
    Attachment,
    ChatSettings,
    ContextBudget,
    Finish,
    FullContext,
    ReplyEnd,
    ReplyEvent,
    Sampling,
    TextDelta,
)


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint([["Hel", "lo."]]) as endpoint:
        yield endpoint


def run(settings: Settings, url: str, work: Callable[[TerminalClient], Awaitable[Any]]) -> Any:
    return run_unsaved(settings, work, url, "secret")


def test_request_and_reply_have_the_format_of_the_endpoint(settings: Settings, endpoint: FakeEndpoint) -> None:
    async def work(client: TerminalClient) -> list[ReplyEvent]:
        sampling = Sampling(temperature=0.5, seed=3, thinking=False)
        chat = (await client.chats.create(ChatSettings("Be kind.", sampling))).summary.id
        message = await client.chats.add(chat, None, "See.", [Attachment("a.py", "x = 1")])
        async with aclosing(client.replies.reply(chat, message.id)) as events:
            received = [event async for event in events]
        assert await client.chats.title(chat) == "A title"
        status = await client.engine.status()
        assert (status.model, status.is_reported) == ("stand-in", False)
        assert client.engine.address() == endpoint.url
        budget = await client.context.budget(chat, None, "four" * 40)
        assert budget == ContextBudget(1 << 24, 2, 40, 1024)
        return received

    received = run(settings, endpoint.url, work)
    assert [event.text for event in received if isinstance(event, TextDelta)] == ["Hel", "lo."]
    assert isinstance(received[-1], ReplyEnd)
    assert received[-1].finish is Finish.COMPLETE
    assert received[-1].usage is not None
    assert (received[-1].usage.prompt_tokens, received[-1].usage.reply_tokens, received[-1].usage.is_detailed) == (
        9,
        2,
        False,
    )
    [asked] = endpoint.asked
    assert asked == {
        "model": "stand-in",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "File a.py:\n```\nx = 1\n```\n\nSee."},
        ],
        "temperature": 0.5,
        "seed": 3,
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_chat_keeps_its_first_title(settings: Settings, endpoint: FakeEndpoint) -> None:
    async def work(client: TerminalClient) -> None:
        chat = (await client.chats.create(ChatSettings())).summary.id
        await client.chats.add(chat, None, "Hi")
        assert await client.chats.title(chat) == "A title"
        endpoint.title = "Another"
        assert await client.chats.title(chat) == "A title"

    run(settings, endpoint.url, work)


def test_title_of_a_chat_is_read_once(
    settings: Settings, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(name: str, reads: Callable[..., Any]) -> Callable[..., Any]:
        def read_and_count(*arguments: Any) -> Any:
            read.append(name)
            return reads(*arguments)

        return read_and_count

    async def work(client: TerminalClient) -> None:
        chat = (await client.chats.create(ChatSettings())).summary.id
        await client.chats.add(chat, None, "Hi")
        monkeypatch.setattr(Chats, "get", counted("chat", Chats.get))
        monkeypatch.setattr(Messages, "in_chat", counted("branch", Messages.in_chat))
        await client.chats.title(chat)
        assert read == ["chat", "branch"]
        await client.chats.title(chat)
        assert read == ["chat", "branch", "chat"]

    run(settings, endpoint.url, work)


@pytest.mark.parametrize("model", [{"id": "tiny-135m"}, {"id": "m", "meta": {"n_params": 999_999_999}}])
def test_small_model_writes_no_title(settings: Settings, endpoint: FakeEndpoint, model: dict[str, object]) -> None:
    endpoint.model |= model

    async def work(client: TerminalClient) -> str:
        chat = (await client.chats.create(ChatSettings())).summary.id
        await client.chats.add(chat, None, "Tell me of rivers in Norway, please, and of its lakes")
        return await client.chats.title(chat)

    assert run(settings, endpoint.url, work) == "Tell me of rivers in Norway, please, and…"
    assert endpoint.asked == []


def replied(settings: Settings, url: str) -> list[ReplyEvent]:
    async def work(client: TerminalClient) -> list[ReplyEvent]:
        chat = (await client.chats.create(ChatSettings())).summary.id
        message = await client.chats.add(chat, None, "Hi")
        async with aclosing(client.replies.reply(chat, message.id)) as events:
            return [event async for event in events]

    received: list[ReplyEvent] = run(settings, url, work)
    return received


def test_usage_is_measured_if_the_server_reports_none(settings: Settings, endpoint: FakeEndpoint) -> None:
    endpoint.usage = None
    end = replied(settings, endpoint.url)[-1]
    assert isinstance(end, ReplyEnd)
    assert end.usage is not None
    assert (end.usage.prompt_tokens, end.usage.reply_tokens, end.usage.is_detailed) == (0, 0, False)
    assert end.usage.first_token_seconds > 0  # measured by the client


def test_unknown_context_length_has_no_limit(settings: Settings, endpoint: FakeEndpoint) -> None:
    del endpoint.model["max_model_len"]

    async def work(client: TerminalClient) -> None:
        chat = (await client.chats.create(ChatSettings())).summary.id
        leaf = None
        for _ in range(3):
            leaf = (await client.chats.add(chat, leaf, "four" * 9000)).id
            async with aclosing(client.replies.reply(chat, leaf)) as events:
                assert [event async for event in events]
            leaf = (await client.chats.open(chat)).leaf
        budget = await client.context.budget(chat, leaf, "Hi")
        assert (budget.limit, budget.free, budget.lacking) == (None, None, 0)
        assert budget.used > 27_000
        for how in (FullContext.DROP_OLDEST, FullContext.SUMMARIZE):
            plan = await client.context.plan(chat, leaf, how, "Hi")
            assert len(plan.messages) == 4
            assert plan.tokens > 17_000
        assert (await client.context.trim(chat, plan)).summaries[0].text == "A title"

    run(settings, endpoint.url, work)


def test_reported_usage_corrects_the_estimated_tokens(settings: Settings, endpoint: FakeEndpoint) -> None:
    endpoint.model["max_model_len"] = 512
    endpoint.usage = {"prompt_tokens": 81, "completion_tokens": 431}
    endpoint.replies = [["1 2 3 4 " * 40]]

    async def work(client: TerminalClient) -> None:
        chat = (await client.chats.create(ChatSettings())).summary.id
        question = (await client.chats.add(chat, None, "Count, " * 10)).id
        assert (await client.context.budget(chat, question, "")).used < 81  # an estimate
        async with aclosing(client.replies.reply(chat, question)) as events:
            assert [event async for event in events]
        leaf = (await client.chats.open(chat)).leaf
        full = await client.context.budget(chat, leaf, "")
        assert (full.limit, full.used) == (512, 512)
        plan = await client.context.plan(chat, leaf, FullContext.DROP_OLDEST, "And now?")
        assert len(plan.messages) == 2
        await client.context.trim(chat, plan)
        trimmed = await client.context.budget(chat, leaf, "And now?")
        assert trimmed.used < 20
        assert not trimmed.lacking

    run(settings, endpoint.url, work)


def test_usage_details_in_another_format_are_ignored(settings: Settings, endpoint: FakeEndpoint) -> None:
    endpoint.usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": None}}
    end = replied(settings, endpoint.url)[-1]
    assert isinstance(end, ReplyEnd)
    assert end.usage is not None
    assert (end.usage.sources.device, end.usage.sources.computed) == (0, 9)


def test_interrupted_reply_keeps_its_text(settings: Settings, endpoint: FakeEndpoint) -> None:
    endpoint.breaks_off = True
    *parts, end = replied(settings, endpoint.url)
    assert [part.text for part in parts if isinstance(part, TextDelta)] == ["Hel", "lo."]
    assert isinstance(end, ReplyEnd)
    assert end.finish is Finish.FAILED
    assert end.error


@pytest.mark.parametrize(
    ("is_inglenook", "message"), [(True, "^the engine stopped during this reply$"), (False, "^the server at")]
)
def test_lost_connection_to_an_ingle_server_is_reported_as_a_stopped_engine(is_inglenook: bool, message: str) -> None:
    async def crash(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nda")  # an incomplete chunk
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(crash, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            endpoint = ChatEndpoint(f"http://127.0.0.1:{port}/v1", None, is_inglenook=is_inglenook)
            with pytest.raises(ServerUnreachable, match=message):
                await anext(endpoint.stream({"model": "stand-in", "messages": []}))
            await endpoint.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b'{"error": "wrong key"}', "status 401: wrong key"),
        (403, b'{"error": {"message": "Not for you."}}', "^Not for you$"),
        (500, b'{"message": "out\\nof\\u001b memory"}', "status 500: out of␛ memory$"),
        (422, b'{"detail": [{"loc": ["body"], "msg": "field required"}]}', "status 422: field required$"),
        (400, b'{"detail": "no such thing"}', "status 400: no such thing$"),
        (429, b"Slow down.", "status 429: Slow down$"),
        (500, b"x" * 5000, "status 500: x{300}…$"),
        (502, b"<html><body>Bad gateway</body></html>", "status 502$"),
        (500, b"[" * 100_000, "status 500"),
        (500, b'{"error": 5}', "status 500$"),
    ],
)
def test_error_message_of_the_server_is_reported(
    settings: Settings, endpoint: FakeEndpoint, status: int, body: bytes, said: str
) -> None:
    endpoint.refusal = status, body
    with pytest.raises(ClientError, match=said) as raised:
        replied(settings, endpoint.url)
    assert "\n" not in raised.value.message
    assert ("--api-key-file" in raised.value.remedy) == (status in (401, 403))


@pytest.mark.parametrize("answer", [(404, b"Not Found"), (200, b"Ollama is running"), (200, b"[]")])
def test_url_without_v1_is_explained(settings: Settings, endpoint: FakeEndpoint, answer: tuple[int, bytes]) -> None:
    endpoint.refusal = answer
    with pytest.raises(ClientError) as raised:
        replied(settings, endpoint.url.removesuffix("/v1"))
    assert "usually ends with /v1" in raised.value.remedy


@pytest.mark.parametrize("url", ["http://[::1", "localhost:8000/v1", "http://", "http://h:port/v1"])
def test_invalid_url_is_explained(settings: Settings, url: str) -> None:
    with pytest.raises(ClientError, match="is not the URL of an endpoint") as raised:
        replied(settings, url)
    assert raised.value.remedy == "Write it like http://127.0.0.1:8000/v1."


def test_error_during_a_reply_is_reported_in_sentences(settings: Settings, endpoint: FakeEndpoint) -> None:
    endpoint.error = {"message": "Try again."}
    end = replied(settings, endpoint.url)[-1]
    assert end == ReplyEnd(Finish.FAILED, error="Try again.")


def test_unknown_model_of_an_endpoint_is_reported(settings: Settings, endpoint: FakeEndpoint) -> None:
    other = replace(settings, model="other", origins={**settings.origins, "model": "--model"})
    with pytest.raises(ClientError, match="has no model other") as raised:
        replied(other, endpoint.url)
    assert "stand-in" in raised.value.remedy


def test_endpoint_models_can_be_loaded(settings: Settings, endpoint: FakeEndpoint) -> None:
    async def work(client: TerminalClient) -> None:
        await client.engine.status()
        with pytest.raises(ClientError, match="has no model other"):
            [state async for state in client.models.load("other")]
        assert (await client.engine.status()).model == "stand-in"
        [state async for state in client.models.load("stand-in")]

    run(settings, endpoint.url, work)


def test_endpoint_models_are_listed(settings: Settings, endpoint: FakeEndpoint) -> None:
    async def work(client: TerminalClient) -> None:
        await client.engine.status()
        assert await client.models.installed() == [ModelInfo("stand-in", loaded=True, elsewhere=True)]
        assert await client.models.catalog() == ()
        assert (await client.models.fit("stand-in")).verdict == "On the endpoint; 16,777,216 tokens of context"
        for refused in (client.models.delete("stand-in"), client.models.search("a"), client.models.variants("a/b")):
            with pytest.raises(ClientError, match="manages its models itself"):
                await refused
        with pytest.raises(ClientError, match="manages its models itself"):
            [step async for step in client.models.pull("a/b")]

    run(settings, endpoint.url, work)


def test_endpoint_models_are_listed_without_a_loaded_one(settings: Settings, endpoint: FakeEndpoint) -> None:
    other = replace(settings, model="other", origins={**settings.origins, "model": "--model"})

    async def work(client: TerminalClient) -> None:
        with pytest.raises(ClientError, match="has no model other"):
            await client.engine.status()
        assert await client.models.installed() == [ModelInfo("stand-in", elsewhere=True)]

    run(other, endpoint.url, work)


async def loaded_when_ready(client: TerminalClient, is_ready: Callable[[], object]) -> str:
    """Follow the loading of a model. Call `is_ready` when the server is reported to load, and return the last stage."""
    stage = ""
    async for now in client.engine.loading():
        stage = now.stage
        if "may be loading its model" in stage:
            is_ready()
    return stage


def test_chat_waits_for_an_endpoint_that_accepts_connections_and_does_not_answer_yet(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.chat_backend.endpoint._ANSWER_SECONDS", 0.3)
    with ExitStack() as serving:
        silent = FakeEndpoint()
        start = lru_cache(lambda: serving.enter_context(silent))
        assert run(settings, silent.url, lambda client: loaded_when_ready(client, start)) == "loaded"


def test_chat_waits_for_a_llama_cpp_server_that_loads_its_model(settings: Settings, endpoint: FakeEndpoint) -> None:
    endpoint.refusal = 503, b'{"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}'
    done = partial(setattr, endpoint, "refusal", None)
    assert run(settings, endpoint.url, lambda client: loaded_when_ready(client, done)) == "loaded"


def test_unreachable_endpoint_is_reported(settings: Settings) -> None:
    with pytest.raises(ClientError, match=r"does not respond: it accepts no connection"):
        replied(settings, "http://127.0.0.1:9/v1")


@pytest.mark.parametrize(
    ("written", "title"),
    [
        ('"Rivers of Norway."\n', "Rivers of Norway"),
        ("\n\n**Title: x**", "x"),
        ("Here is the **answer**", "Here is the answer"),
        ("*Two* uses of `a * b * c`", "Two uses of a * b * c"),
        ("Sort by 2 * 3 ** 4", "Sort by 2 * 3 ** 4"),
        ("Title: Rivers", "Rivers"),
        ("To the pride of the night,", "To the pride of the night"),
        (
            "A song for those at sea, the sailors of the long dark, windless night",
            "A song for those at sea, the sailors of the long dark…",
        ),
        ("Here's a title:\n\n**Rivers**", "Rivers"),
        ("Here's a title for **you:**", ""),
        ("", ""),
        ("word " * 40, "word " * 11 + "word…"),
        ("w" * 100, ""),
        ("\x1b[31mRed", "␛[31mRed"),
    ],
)
def test_extracted_title_is_one_short_line(written: str, title: str) -> None:
    assert extract_title(written) == title


@pytest.mark.parametrize(
    ("model", "small"),
    [
        ("smollm2:135m", True),
        ("qwen3:0.6b", True),
        ("/models/SmolLM2-135M-Instruct.Q4_1.gguf", True),
        ("qwen3:4b", False),
        ("Qwen/Qwen3-30B-A3B", False),
        ("gpt-4o", False),
        ("my-model", False),
    ],
)
def test_model_name_states_whether_the_model_is_small(model: str, small: bool) -> None:
    assert is_small(model, None) is small


@pytest.mark.parametrize(("parameters", "small"), [(134_515_008, True), (1_000_000_000, False)])
def test_number_of_parameters_counts_more_than_the_name(parameters: int, small: bool) -> None:
    assert is_small("m", parameters) is is_small("70b", parameters) is is_small("135m", parameters) is small


def test_drafts_of_a_reply_are_counted(settings: Settings, endpoint: FakeEndpoint) -> None:
    endpoint.timings = {"queue_ms": 1.0, "predicted_ms": 900.0, "draft_n": 12, "draft_n_accepted": 9}

    async def work(client: TerminalClient) -> ReplyEvent:
        chat = (await client.chats.create(ChatSettings())).summary.id
        message = await client.chats.add(chat, None, "Hi")
        async with aclosing(client.replies.reply(chat, message.id)) as events:
            return [event async for event in events][-1]

    end = run(settings, endpoint.url, work)
    assert isinstance(end, ReplyEnd)
    assert end.usage is not None
    assert (end.usage.drafted_tokens, end.usage.accepted_tokens) == (12, 9)
