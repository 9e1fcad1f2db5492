"""Tests for the status line below the prompt."""

import asyncio

import pytest
from textual.app import App, ComposeResult

from tests.tui.pilots import Chatting, at_rest, run
from tests.tui.scripted_client import WAIT, ScriptedClient
from tui.client import ClientError
from tui.engine_types import Loading
from tui.types import ChatId, ChatSettings, ContextBudget, Finish, MessageId, ReplyEnd, Sampling, TextDelta
from tui.widgets.status_line import StatusLine

FILE = "/home/ann/models/Model.gguf"
HALF = ContextBudget(8000, 100, 3900, 1000)


class Lined(App[None]):
    def compose(self) -> ComposeResult:
        yield StatusLine()


def shown(model: str, loading: Loading | None, *, width: int = 120) -> str:
    """Return the status line of a private chat with a temperature and a system prompt."""

    async def show() -> str:
        async with Lined().run_test(size=(width, 24)) as pilot:
            line = pilot.app.query_one(StatusLine)
            line.model, line.loading_model = model, loading
            line.budget, line.is_private = HALF, True
            line.settings = ChatSettings("Be brief.", Sampling(temperature=0.2))
            return line.render().plain

    return asyncio.run(show())


@pytest.mark.parametrize(
    ("model", "loading", "first"),
    [
        ("smollm2:135m", None, "smollm2:135m"),
        (FILE, None, "Model"),
        (FILE, Loading(FILE, f"Loading {FILE}", 0.5), "Loading Model: 50 %"),
        (FILE, Loading(FILE, f"Loading {FILE}", 0.5, amount="49 of 98 MB"), "Loading Model: 50 %, 49 of 98 MB"),
        ("m", Loading("m", "Preparing m for this machine", 0.5), "Preparing m for this machine: 50 %"),
        ("m", Loading("m", "Unpacking", 0.9, amount="88 of 98 MB"), "m: Unpacking, 90 %, 88 of 98 MB"),
        ("m", Loading("m", "Compiling", amount="3 of 9"), "m: Compiling, 3 of 9"),
        ("", Loading(FILE, "Waiting for memory"), "Model: Waiting for memory"),
    ],
)
def test_status_line_shows_model_context_and_settings(model: str, loading: Loading | None, first: str) -> None:
    rest = "private   ▓▓▓▓▓░░░░░ context 50 % · 4.0k tokens free   temp 0.2   system prompt"
    assert shown(model, loading, width=140) == f"{first}   {rest}"


def test_last_parts_are_left_out_if_the_line_is_short() -> None:
    whole = "smollm2:135m   private   ▓▓▓▓▓░░░░░ context 50 % · 4.0k tokens free"
    assert shown("smollm2:135m", None, width=67) == whole
    assert shown("smollm2:135m", None, width=59) == "smollm2:135m   private   context 50 %   temp 0.2"
    assert shown("smollm2:135m", None, width=24) == "smollm2:135m   private"
    assert shown("smollm2:135m", None, width=8) == "smollm2…"


def test_lack_of_context_is_shown_without_the_bar_in_a_short_line() -> None:
    async def show() -> str:
        async with Lined().run_test(size=(58, 15)) as pilot:
            line = pilot.app.query_one(StatusLine)
            line.model, line.budget = "m", ContextBudget(512, 0, 500, 134)
            return line.render().plain

    assert asyncio.run(show()) == "m   context 98 % · a reply needs 122 more tokens"


@pytest.mark.parametrize(
    ("history", "style"), [(2000, ""), (6600, "$text-warning"), (9000, "$text-error")], ids=["low", "high", "over"]
)
def test_context_bar_has_the_warning_color_before_the_context_is_full(history: int, style: str) -> None:
    async def show() -> None:
        async with Lined().run_test(size=(120, 24)) as pilot:
            line = pilot.app.query_one(StatusLine)
            line.budget = ContextBudget(8000, 0, history, 1000)
            assert {str(span.style) for span in line.render().spans if str(span.style).startswith("$text")} == (
                {style} if style else set()
            )

    asyncio.run(show())


def test_new_chat_does_not_show_the_context_of_the_chat_before() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        await chat.say("A long question. " * 200)
        await chat.until(lambda: chat.composer.status.budget is not None)
        client.context.measures = False
        await chat.pilot.press("f5")
        await chat.until(lambda: chat.conversation.chat.id is None)
        assert chat.composer.status.budget is None

    run(client, flow)


def test_context_is_measured_without_notices_while_the_engine_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    asked: list[str] = []

    async def fail(chat: ChatId | None, leaf: MessageId | None, typed: str) -> ContextBudget:
        asked.append(typed)
        raise ClientError("the engine stopped", "Try again.")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.composer.status.budget is not None)
        monkeypatch.setattr(client.context, "budget", fail)
        await chat.type("typed", enter=False)
        await chat.until(lambda: asked)
        await at_rest(chat.pilot, chat.notices)
        assert not chat.notices()

    run(client, flow)


def test_click_and_context_command_show_the_context_budget() -> None:
    async def flow(chat: Chatting) -> None:
        line = chat.composer.status
        await chat.until(lambda: line.budget is not None and chat.conversation.model)
        await chat.pilot.click(StatusLine, offset=(20, 0))
        await chat.until(lambda: any("System prompt" in notice for notice in chat.notices()))
        chat.app.clear_notifications()
        await chat.until(lambda: not chat.notices())
        await chat.type("/context")
        await chat.until(lambda: any("System prompt" in notice for notice in chat.notices()))
        await chat.type("/set temperature 0.2")
        await chat.until(lambda: "temp 0.2" in line.render().plain)
        await chat.until(lambda: chat.notices()[-1] == "Temperature: 0.2")
        await chat.type("/set temperature")
        await chat.until(lambda: chat.notices()[-1] == "Temperature: default")
        await chat.type("/set heat 1")
        await chat.until(lambda: chat.notices()[-1].startswith("No parameter heat. Parameters: temperature"))
        assert chat.composer.area.text == "/set heat 1"
        chat.composer.area.action_clear()
        await chat.type("/private")
        await chat.until(lambda: "private" in line.render().plain)

    run(ScriptedClient(), flow, size=(120, 24))


def test_context_grows_with_the_reply() -> None:
    async def show() -> None:
        async with Lined().run_test(size=(120, 24)) as pilot:
            line = pilot.app.query_one(StatusLine)
            line.budget = ContextBudget(8000, 0, 3200, 1000)
            line.written = 1600
            assert line.render().plain == "▓▓▓▓▓▓░░░░ context 60 % · 3.2k tokens free"

    asyncio.run(show())


@pytest.mark.parametrize(("limit", "tokens"), [(512, 60), (8192, 0), (None, 0)])
def test_reply_is_counted_to_the_percent_in_a_short_context(limit: int | None, tokens: int) -> None:
    async def show() -> None:
        async with Lined().run_test(size=(120, 24)) as pilot:
            line = pilot.app.query_one(StatusLine)
            line.budget = ContextBudget(limit, 0, 100, 128)
            line.count_reply(63)
            assert line.written == tokens

    asyncio.run(show())


def test_context_is_measured_without_the_reply_that_a_retry_replaces() -> None:
    client = ScriptedClient([TextDelta("reply " * 100), ReplyEnd(Finish.COMPLETE)], [WAIT, ReplyEnd(Finish.COMPLETE)])

    async def flow(chat: Chatting) -> None:
        line = chat.screen.query_one(StatusLine)
        await chat.say("question")
        await chat.until(lambda: line.budget is not None and line.budget.history > 150)
        await chat.pilot.press("ctrl+y")
        await chat.until(lambda: line.budget is not None and line.budget.history < 150)
        assert chat.conversation.current_reply is not None
        client.replies.gate.set()
        await chat.until(lambda: chat.conversation.current_reply is None)

    run(client, flow)


def test_status_line_shows_that_the_engine_has_exited_and_which_model_replaces_it() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        line = chat.app.screen.query_one(StatusLine)
        await chat.until(lambda: line.model and line.loading_model is None)
        await client.engine.loaded.put(Loading("", "stopped"))
        await chat.until(lambda: "stopped. Your next message starts it." in line.render().plain)
        await chat.until(lambda: "is ready" not in chat.label("#welcome"))
        assert not client.engine.tried
        client.engine.runs_elsewhere = True
        await chat.until(lambda: client.engine.tried)
        client.engine.runs_elsewhere = False
        await client.engine.loaded.put(Loading("/models/SmolLM2-135M.gguf", "loaded", loaded=True))
        await chat.until(lambda: line.render().plain.startswith("SmolLM2-135M "))
        await chat.until(lambda: "SmolLM2-135M is ready." in chat.label("#welcome"))
        assert chat.conversation.model == "/models/SmolLM2-135M.gguf"

    run(client, flow)
