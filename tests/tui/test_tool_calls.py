"""Tests for tool calls in replies."""

import json

import pytest

from tests.tui.pilots import Chatting, at_rest, run
from tests.tui.scripted_client import USAGE, WAIT, ScriptedClient
from tui.types import (
    CallId,
    Finish,
    Permission,
    ReasoningDelta,
    ReplyEnd,
    ReplyEvent,
    TextDelta,
    ToolCalled,
    ToolReturned,
)
from tui.widgets import tool_call
from tui.widgets.tool_call import PermissionAsk, ToolCallLine, pretty_json, short_arguments

END = ReplyEnd(Finish.COMPLETE, USAGE)
CALL = CallId("call-1")
CALLED = ToolCalled(CALL, "files.read", '{"path": "README.md", "lines": 20}')
ASKED = ToolCalled(CALL, "files.read", '{"path": "README.md"}', asks=True)
RETURNED = ToolReturned(CALL, "# Inglenook [b]")


def parts(chat: Chatting) -> list[str]:
    return [type(part).__name__ for part in chat.views()[-1].children]


def line(chat: Chatting) -> str:
    return str(chat.screen.query_one(ToolCallLine).query_one("WordButtons").render())


def test_calls_are_folded_lines_between_the_texts() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("go")
        reply = chat.views()[-1].message
        assert (reply.text, reply.steps[0].text) == ("It is a chat.", "I look.")
        assert parts(chat) == ["MessageHeader", "Reasoning", "ReplyText", "ToolCallLine", "ReplyText"]
        assert line(chat) == "▸ ✓ files.read (path: README.md, lines: 20) · 15 B"
        name = chat.conversation.chat.id
        assert name is not None
        chat.views()[-1].focus()
        await chat.pilot.press("ctrl+o")
        shown = chat.label("ToolCallLine .folded-text")
        assert '"lines": 20' in shown
        assert "# Inglenook [b]" in shown

    script: list[ReplyEvent] = [ReasoningDelta("hm"), TextDelta("I look."), CALLED, RETURNED]
    run(ScriptedClient([*script, TextDelta("It is a chat."), END]), flow)


def test_failed_call_is_marked() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("go")
        assert line(chat) == "▸ ✗ files.read (path: README.md, lines: 20) · no file"

    run(ScriptedClient([TextDelta("a"), CALLED, ToolReturned(CALL, "no file", is_error=True), END]), flow)


def test_function_key_answers_a_call_that_asks() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: chat.screen.query(PermissionAsk))
        assert line(chat).endswith("asks for permission")
        reply = chat.conversation.current_reply
        assert reply is not None
        assert reply.activity == "waiting for your permission"
        await chat.type("half", enter=False)
        await chat.pilot.press("f8")
        assert line(chat).endswith("running")
        assert reply.activity == "running a tool"
        assert chat.client.tools.answers == [(CALL, Permission.ONCE)]
        await chat.until(lambda: not chat.screen.query(PermissionAsk))
        assert chat.composer.area.text == "half"
        await chat.pilot.press("f8", "f9")
        chat.client.replies.gate.set()
        await chat.until(lambda: line(chat).endswith("15 B"))
        assert len(chat.client.tools.answers) == 1

    run(ScriptedClient([TextDelta("a"), ASKED, WAIT, RETURNED, END]), flow)


@pytest.mark.parametrize("typed", ["", "half"])
def test_question_takes_the_focus_only_from_an_empty_prompt(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_call, "_GUARD_SECONDS", 0.0)

    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.type(typed, enter=False)
        chat.client.replies.gate.set()
        await chat.until(lambda: chat.screen.query(PermissionAsk))
        if not typed:
            await chat.until(lambda: not chat.composer.area.has_focus)
        await chat.pilot.pause()
        assert chat.composer.area.has_focus is bool(typed)
        if not typed:
            await chat.pilot.press("down", "down", "down", "enter")
            assert chat.client.tools.answers == [(CALL, Permission.DENY)]
            assert chat.composer.area.has_focus

    run(ScriptedClient([TextDelta("a"), WAIT, ASKED, WAIT, RETURNED, END]), flow)


def test_f9_goes_to_the_question_from_a_prompt_with_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_call, "_GUARD_SECONDS", 0.0)

    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.type("half", enter=False)
        chat.client.replies.gate.set()
        await chat.until(lambda: chat.screen.query(PermissionAsk))
        await chat.until(lambda: any("F8 to allow · F9 to choose" in shown for shown in chat.lines()))
        await chat.pilot.press("f9", "down", "down", "enter")
        assert chat.client.tools.answers == [(CALL, Permission.ALWAYS)]
        assert chat.composer.area.has_focus
        assert chat.composer.area.text == "half"

    run(ScriptedClient([TextDelta("a"), WAIT, ASKED, WAIT, RETURNED, END]), flow)


@pytest.mark.share(1)
@pytest.mark.parametrize("size", [(60, 15), (80, 24)])
def test_question_about_long_arguments_shows_the_tool_and_all_answers(size: tuple[int, int]) -> None:
    arguments = json.dumps({f"name {number}": number for number in range(40)})
    asked = ToolCalled(CALL, "files.read", arguments, asks=True)

    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: chat.screen.query(PermissionAsk))
        await chat.until(lambda: any("Deny" in line for line in chat.lines()))
        shown = "\n".join(await at_rest(chat.pilot, chat.lines))
        assert [one for one in ("Run files.read?", '"name 0": 0', "Allow once", "Deny") if one not in shown] == []
        assert "pgdn more" in shown
        for _ in range(40):
            if any('"name 39": 39' in line for line in chat.lines()):
                break
            await chat.pilot.press("pagedown")
        assert any('"name 39": 39' in line for line in await at_rest(chat.pilot, chat.lines))

    run(ScriptedClient([TextDelta("I look.\n\n" * 20), asked, WAIT, RETURNED, END]), flow, size=size)


def test_question_is_shown_again_when_the_chat_is_opened() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: chat.screen.query(PermissionAsk))
        name = chat.conversation.chat.id
        assert name is not None
        await chat.conversation.open_new()
        assert not chat.screen.query(PermissionAsk)
        await chat.conversation.open(name)
        assert parts(chat) == ["MessageHeader", "ReplyText", "ToolCallLine", "PermissionAsk"]
        await chat.pilot.press("escape", "escape")
        await chat.until(lambda: not chat.screen.query(PermissionAsk))
        assert line(chat).endswith("stopped")

    run(ScriptedClient([TextDelta("a"), ASKED, WAIT, RETURNED, END]), flow)


def test_long_arguments_are_cut() -> None:
    assert short_arguments('{"text": "' + "word " * 50 + '"}') == f"text: {('word ' * 50)[:39]}…"
    assert short_arguments("not json") == "not json"
    assert short_arguments("") == ""


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"a":' * 100_000, "[" * 100_000])
def test_invalid_and_deeply_nested_arguments_are_shown_as_text(arguments: str) -> None:
    line = ToolCallLine("files.read", arguments)
    line.finish("no", is_error=True)
    assert short_arguments(arguments)[0] == arguments[0]
    assert pretty_json(arguments).startswith(arguments[0])


@pytest.mark.parametrize("depth", [100, 300, 600, 900])
def test_nested_arguments_of_any_depth_are_shown(depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    assert short_arguments(arguments)
    assert pretty_json(arguments).startswith("{")
