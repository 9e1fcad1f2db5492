"""Tests for the status line below a running reply."""

import asyncio

import pytest

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import USAGE, WAIT, ScriptedClient
from tui.client import ClientError
from tui.reply_progress import ReplyProgress
from tui.types import (
    CallId,
    ChatId,
    ContextBudget,
    EngineRestarting,
    Finish,
    MessageId,
    PromptProgress,
    ReasoningDelta,
    ReplyEnd,
    ReplyStarted,
    TextDelta,
    ToolCalled,
    ToolReturned,
)
from tui.widgets.composer import Composer
from tui.widgets.reply_status import ReplyStatus, describe

END = ReplyEnd(Finish.COMPLETE, USAGE)


class Clock:
    """A clock whose time a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_stage_of_a_reply_is_described() -> None:
    clock = Clock()
    reply = ReplyProgress(ChatId("1"), MessageId("1"), clock)
    clock.now = 2.0
    assert describe(reply, 80) == "Waiting for the model 2 s"
    reply.apply(PromptProgress(1000, 7000))
    assert describe(reply, 60) == "Reading your message  14 %"
    clock.now = 4.0
    reply.apply(PromptProgress(4000, 7000))
    assert describe(reply, 80) == "Reading your message  ━━━━━━━━━━────────  4,000 / 7,000 tokens  2 s left"
    reply.apply(ReplyStarted(MessageId("2"), "m"))
    reply.apply(ReasoningDelta("hm"))
    clock.now = 8.0
    assert describe(reply, 80) == "1 token · 4 s"
    reply.apply(TextDelta("a b c d", 40))
    clock.now = 10.0
    assert describe(reply, 80) == "7 tok/s · 41 tokens · 2 s"
    reply.apply(ToolCalled(CallId("1"), "files.read", "{}"))
    clock.now = 13.0
    assert describe(reply, 80) == "Running files.read 3 s"
    reply.apply(ToolReturned(CallId("1"), "done"))
    assert describe(reply, 80) == "Waiting for the model 0 s"
    reply.stopping = True
    assert describe(reply, 80) == "Stopping"


def test_speed_counts_only_the_tokens_after_the_first_delta() -> None:
    clock = Clock()
    reply = ReplyProgress(ChatId("1"), MessageId("1"), clock)
    reply.apply(TextDelta("a b c", 30))
    assert describe(reply, 80) == "30 tokens · 0 s"
    clock.now = 0.5
    reply.apply(TextDelta("d e f", 20))
    assert describe(reply, 80) == "40 tok/s · 50 tokens · 0 s"


def test_tokens_are_counted_across_tool_calls_and_the_speed_within_a_turn() -> None:
    clock = Clock()
    reply = ReplyProgress(ChatId("1"), MessageId("1"), clock)
    reply.apply(ReplyStarted(MessageId("2"), "m"))
    reply.apply(TextDelta("a", 30))
    clock.now = 1.0
    reply.apply(ToolCalled(CallId("1"), "files.read", "{}"))
    reply.apply(ToolReturned(CallId("1"), "done"))
    assert reply.tokens == 30
    clock.now = 9.0
    reply.apply(TextDelta("b", 5))
    assert describe(reply, 80) == "35 tokens · 0 s"
    clock.now = 10.0
    reply.apply(TextDelta("c", 15))
    assert describe(reply, 80) == "15 tok/s · 50 tokens · 1 s"


def test_status_line_is_below_the_question_until_the_reply_ends() -> None:
    async def flow(chat: Chatting) -> None:
        status = chat.screen.query_one(ReplyStatus)
        assert not status.display
        await chat.type("long")
        await chat.until(lambda: any("Reading your message" in line for line in chat.lines()))
        line = chat.lines()[status.region.y]
        assert "100 / 900" in line
        assert "esc to stop" in line
        assert status.region.y == chat.views()[-1].region.bottom + 1  # one line of margin below the question
        chat.client.replies.gate.set()
        await chat.until(lambda: "Hi" in chat.texts() and not status.display)

    run(ScriptedClient([PromptProgress(100, 900), WAIT, TextDelta("Hi"), END]), flow)


def test_events_within_a_stage_do_not_redraw_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    status, reply, redrawn = ReplyStatus(), ReplyProgress(ChatId("1"), MessageId("1")), list[str]()
    monkeypatch.setattr(status, "refresh", lambda *_, **__: redrawn.append("frame"))
    status.follow(reply, "writing")
    redrawn.clear()
    status.follow(reply, "writing")
    assert not redrawn
    status.follow(reply, "thinking")
    assert redrawn


def test_line_of_a_growing_reply_is_redrawn_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, status, reply = Clock(), ReplyStatus(), ReplyProgress(ChatId("1"), MessageId("1"))
    monkeypatch.setattr("tui.widgets.reply_status.monotonic", clock)
    reply.apply(TextDelta("a"))
    status.follow(reply, "writing")
    frames = [status.frame]
    for now, update in (
        (0.1, False),
        (0.1, True),
        (0.25, True),
        (0.35, False),
        (0.5, True),
        (0.6, False),
        (0.9, False),
    ):
        clock.now = now
        if update:
            status.follow(reply, "writing")
        else:
            status.tick()
        frames.append(status.frame - frames[0])
    assert frames[1:] == [0, 0, 1, 1, 2, 2, 3]


def test_retry_after_the_engine_stopped_says_so_and_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient([TextDelta("first"), END], [EngineRestarting(), WAIT, TextDelta("second"), END])

    async def fail(*_: object) -> ContextBudget:
        raise ClientError("the server does not respond: ReadError", "Try again: the engine restarts.")

    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        monkeypatch.setattr(client.context, "budget", fail)
        await chat.type("/regenerate")
        await chat.until(lambda: any("Starting the engine again" in line for line in chat.lines()))
        await chat.until(lambda: client.engine.tried == 1)
        client.replies.gate.set()
        await chat.until(lambda: chat.texts() == ["one", "second"])
        assert not any("does not respond" in notice for notice in chat.notices())

    # The error is also shown if the context is measured meanwhile, which a busy machine has the time for.
    monkeypatch.setattr(Composer, "measure", lambda _: None)
    run(client, flow)


def test_message_is_shown_at_once_while_the_engine_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient([EngineRestarting(), WAIT, TextDelta("hello"), END])

    async def wait(*_: object) -> ContextBudget:
        await asyncio.Event().wait()
        raise AssertionError

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.conversation.model)
        client.engine.loads.clear()
        monkeypatch.setattr(client.context, "budget", wait)
        await chat.type("one")
        await chat.until(lambda: chat.texts() == ["one"])
        await chat.until(lambda: "reading the weights" in chat.lines()[-2])
        client.engine.loads.set()
        client.replies.gate.set()
        await chat.until(lambda: chat.texts() == ["one", "hello"])
        await chat.until(lambda: chat.lines()[-2].strip().startswith("smollm2:135m"))

    run(client, flow)
