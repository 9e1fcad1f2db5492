"""Tests for the plain chat: the exact output for pipes and screen readers."""

import asyncio
import io
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from app.chat_backend.engine.loading_state import LoadingLines
from app.chat_backend.models import ChatModels
from app.chat_backend.plain.plain_chat import PlainChat, WholeWords
from app.chat_backend.plain.wrapping import Wrapping
from app.chat_backend.session import Session
from app.history.database import FILE_NAME
from app.settings.settings import Settings
from tests.app.chat_backend.conftest import Clients
from tests.support.fake_endpoint import FakeEndpoint
from tests.tui.scripted_client import Script, ScriptedClient, ScriptedModels
from tui.clipboard import Clipboard, Destination
from tui.commands import COMMANDS
from tui.engine_types import Loading, Recommendation
from tui.types import (
    DEFAULT_PRESET,
    CallId,
    ChatSettings,
    Finish,
    FullContext,
    Notice,
    Permission,
    Preset,
    ReasoningDelta,
    ReplyEnd,
    Role,
    Sampling,
    TextDelta,
    ToolCalled,
    ToolInfo,
    ToolReturned,
    ToolServer,
)


class Person(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(clients: Clients, monkeypatch: pytest.MonkeyPatch, *lines: str, question: str = "") -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    async def main() -> int:
        async with clients() as client:
            return await PlainChat(client, Clipboard({}), question).run()

    return asyncio.run(main())


def scripted(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch, *lines: str, is_person: bool = False) -> int:
    """Run the plain chat with a scripted client, and return its exit status."""
    monkeypatch.setattr("sys.stdin", (Person if is_person else io.StringIO)("".join(f"{line}\n" for line in lines)))
    return asyncio.run(PlainChat(client, Clipboard({})).run())


@pytest.mark.usefixtures("running")
def test_piped_questions_are_answered(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def short() -> None:
        async with clients() as client:
            await client.chats.save_preset(Preset("short", ChatSettings(sampling=Sampling(max_tokens=5, seed=1))))

    asyncio.run(short())
    file = tmp_path / "chat.md"
    commands = ["/preset short", "Hi", "/regenerate", "/title Greeting", "/pin", f"/export {file}", "/chats", "/delete"]
    status = said(
        clients, monkeypatch, *commands, "/undo", "/search Hi", "/new", "/chats", "/open 1", "/quit", "unread"
    )
    out, err = capsys.readouterr()
    assert status == 0
    assert "1. Greeting (3 messages, pinned)" in out
    assert out.count("Deleted. /undo restores it.\nRestored.\n1. Greeting: You: Hi") == 1
    assert file.read_text(encoding="utf-8").startswith("# Greeting\n")
    assert err.count("Reply cut at its limit of tokens.") == 2
    assert "You: Hi" in out
    assert "unread" not in out
    assert "\x1b" not in out + err


@pytest.mark.usefixtures("running")
def test_failure_is_printed_and_sets_the_exit_status(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(clients, monkeypatch, "/nothing", "/open 3", "/export", "/preset x", "/undo", "/regenerate") == 1
    out, err = capsys.readouterr()
    assert err.count("error: ") == 6
    assert "unknown command /nothing" in err
    assert "\ntry: /help lists all commands.\n" in err
    assert out == ""


def test_failed_load_is_printed(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from app.chat_backend.engine.process import EngineProcess
    from app.errors import EngineFailed

    def fail(*given: object) -> None:
        raise EngineFailed("the model is not there", "ingle pull it")

    monkeypatch.setattr(EngineProcess, "start", fail)
    assert said(clients, monkeypatch, question="Hi") == 1
    assert "error: the model is not there\ntry: ingle pull it\n" in capsys.readouterr().err


def test_help_prints_one_line_per_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scripted(ScriptedClient(), monkeypatch, "/help")
    lines = capsys.readouterr().out.splitlines()
    assert "/export PATH: Export this chat (.json: all branches)." in lines
    assert "/open NUMBER: Open a chat from the list." in lines
    assert "/chats: List the chats with numbers." in lines
    assert len(lines) > 20


def test_plain_chat_refuses_the_commands_that_need_a_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(ScriptedClient(), monkeypatch, "/help")
    listed = {line.partition(":")[0].split()[0].lstrip("/") for line in capsys.readouterr().out.splitlines()}
    assert listed - {command.name for command in COMMANDS} == {"open"}
    others = [command.name for command in COMMANDS if command.name not in listed]
    scripted(ScriptedClient(), monkeypatch, *(f"/{name}" for name in others))
    err = capsys.readouterr().err
    assert [name for name in others if f"error: the plain chat has no /{name}\n" not in err] == []


def test_edit_sends_another_text_as_a_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    assert scripted(client, monkeypatch, "/edit x", "Hi", "And now?", "/edit And then?", "/edit") == 1
    [chat] = client.chats.chats.values()
    first, second, third = [message for message in chat.messages if message.role is Role.USER]
    assert (first.text, second.text, third.text) == ("Hi", "And now?", "And then?")
    assert second.parent == third.parent is not None


def test_installed_models_and_catalog_are_separate_lists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(ScriptedClient(), monkeypatch, "/models", "/models catalog")
    here = "smollm2:135m, 145 MB, in use"
    more = ["qwen3:4b, about 2.5 GB, fits", "llama3.3:70b, 42.5 GB, too large"]
    expected = [here, "/models catalog lists models to download.", here, *more]
    assert capsys.readouterr().out.splitlines() == expected


def test_attached_file_is_sent_with_the_next_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("a note of some length", encoding="utf-8")
    client = ScriptedClient()
    attach = f"/attach {tmp_path / 'note.txt'}"
    scripted(client, monkeypatch, attach, "What does it say?", "And now?", attach, "/attach", "And then?")
    assert "note.txt: 5 tokens, attached to the next message.\n" in capsys.readouterr().out
    [chat] = client.chats.chats.values()
    asked = [message for message in chat.messages if message.role is Role.USER]
    assert [len(message.attachments) for message in asked] == [1, 0, 0]


def test_file_named_in_a_message_is_attached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("a note", encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\0")
    monkeypatch.chdir(tmp_path)
    client = ScriptedClient()
    assert scripted(client, monkeypatch, "What does @note.txt say?", "see @picture.png") == 1
    err = capsys.readouterr().err
    assert "Attached note.txt" in err
    assert "error: the file picture.png is not text." in err
    [chat] = client.chats.chats.values()
    [asked] = [message for message in chat.messages if message.role is Role.USER]
    assert (asked.text, [file.text for file in asked.attachments]) == ("What does note.txt say?", ["a note"])


def test_presets_are_listed_with_the_one_in_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = ScriptedClient()
    client.chats.kept_presets["short"] = Preset("short", ChatSettings("Be brief."))
    assert scripted(client, monkeypatch, "/preset", "/preset short", "/preset") == 0
    out = capsys.readouterr().out
    assert "preset: none. Available: short, none." in out
    assert "Preset short applied.\npreset: short. Available: short, none." in out


def test_settings_are_shown_and_set_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = ScriptedClient()
    wrong = ["/set heat 3", "/set temperature 9", "/set thinking hard", "/set full burst"]
    right = ["/set temperature 0.5", "/set seed 7", "/set seed", "/set thinking off", "/set full drop"]
    assert scripted(client, monkeypatch, "/system Be brief.", *right, *wrong, "/settings") == 1
    [chat] = client.chats.chats.values()
    sampling = Sampling(temperature=0.5, thinking=False)
    assert chat.settings == ChatSettings("Be brief.", sampling, FullContext.DROP_OLDEST)
    out, err = capsys.readouterr()
    assert err.count("error: ") == len(wrong)
    expected = ["system: Be brief.", "temperature: 0.5", "seed: model default", "thinking: off", "full: drop"]
    assert set(expected) <= set(out.splitlines())


def test_chat_gets_a_title(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    scripted(client, monkeypatch, "Hi", "Once more")
    [chat] = client.chats.chats
    assert chat in client.chats.titled


LONG = "word " * 4000


@pytest.mark.parametrize(
    ("is_person", "lines", "asked", "left_out"),
    [
        (True, ["drop"], 3, True),
        (True, ["no"], 2, False),
        (False, [], 2, False),
        (False, ["/set full drop", LONG[:4000]], 3, True),
    ],
)
def test_full_context_is_reported_and_trimmed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_person: bool,
    lines: list[str],
    asked: int,
    left_out: bool,
) -> None:
    client = ScriptedClient()
    client.context.limit = 7000
    scripted(client, monkeypatch, LONG, "Short.", LONG[:4000] + "!", *lines, is_person=is_person)
    [chat] = client.chats.chats.values()
    out, err = capsys.readouterr()
    assert (len(client.replies.asked), bool(chat.left_out)) == (asked, left_out)
    assert ("The context is full. " in out, "the context is full: nothing was sent" in err) == (
        True,
        "drop" not in lines,
    )


def test_unsent_message_becomes_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    client.context.limit = 100
    assert scripted(client, monkeypatch, "Too much") == 1
    assert list(client.chats.drafts.values()) == ["Too much"]


def test_reasoning_is_reported_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    client = ScriptedClient()
    thought = [ReasoningDelta("One. "), ReasoningDelta("Two.")]
    client.replies.scripts = [[*thought, TextDelta("Three."), ReplyEnd(Finish.COMPLETE)]]
    assert scripted(client, monkeypatch, "Count.") == 0
    out, err = capsys.readouterr()
    assert out == "Three.\n"
    assert err.splitlines().count("Thinking") == 1


@pytest.mark.parametrize(("command", "is_made"), [("/room drop", True), ("/room", False)])
def test_room_command_trims_the_context(monkeypatch: pytest.MonkeyPatch, command: str, is_made: bool) -> None:
    client = ScriptedClient()
    assert scripted(client, monkeypatch, "A long question", command) == (not is_made)
    [chat] = client.chats.chats.values()
    assert bool(chat.left_out) == is_made


@pytest.mark.parametrize("again", ["Again.", "/regenerate"])
def test_restart_of_the_engine_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], again: str
) -> None:
    client = ScriptedClient()
    client.engine.loads.set()

    async def is_ready() -> bool:
        return bool(client.engine.tried)  # the engine has exited, until it is started again

    monkeypatch.setattr(client.engine, "is_ready", is_ready)
    assert scripted(client, monkeypatch, "Hello.", again) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == ["The engine has stopped. It starts again.", "The engine is ready."]
    assert client.engine.tried == 1


def test_loading_progress_is_printed_every_few_seconds() -> None:
    times = iter([0.0, 0.1, 4.0, 6.0, 12.0])
    lines = LoadingLines(lambda: next(times))
    states = [Loading("m", "starting")] + [Loading("m", "fetching", share) for share in (0.1, 0.2, 0.3, 0.3)]
    assert [lines.line(state) for state in states] == ["m: starting", "", "", "m: fetching, 30 %", ""]


def test_loading_line_names_a_model_file_without_its_folder() -> None:
    file = "/home/ann/models/Tiny.Q4_0.gguf"
    lines = LoadingLines(lambda: 0.0)
    assert lines.line(Loading(file, f"loading {file}")) == "loading Tiny.Q4_0"
    assert lines.line(Loading(file, "loaded", loaded=True, warning="it holds little")) == "Tiny.Q4_0: it holds little"


def test_loading_warning_is_printed_at_once() -> None:
    lines = LoadingLines(lambda: 0.0)
    assert lines.line(Loading("m", "starting")) == "m: starting"
    assert lines.line(Loading("m", "loaded", loaded=True, warning="it holds little")) == "m: it holds little"


def test_writes_end_at_word_boundaries() -> None:
    words = WholeWords()
    assert words.add("one tw") == ""
    assert words.add("o\nthr") == "one two\n"
    assert words.add("ee " + "four " * 30) == "three " + "four " * 30
    assert words.add("fi") == ""
    assert words.rest() == "fi"
    assert words.rest() == ""


def test_replies_are_wrapped_between_words() -> None:
    lines = Wrapping(12)
    parts = ("some words ", "that are\nshort and ", "one-that-is-too-long ", "漢字漢字 漢字 ", "end\n")
    assert "".join(map(lines.wrap, parts)).splitlines() == [
        "some words",
        "that are",
        "short and",
        "one-that-is-too-long",
        "漢字漢字",
        "漢字 end",
    ]
    code = "```py\n  a_long_line = of(code)\n```\n"
    assert lines.wrap(code) == code


def test_damaged_history_is_reported(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.history_dir.mkdir(parents=True)
    (settings.history_dir / FILE_NAME).write_bytes(b"no database at all, and of some length")
    monkeypatch.setattr("sys.stdin", io.StringIO("/quit\n"))
    session = Session(settings, {"stay": False}, "http://127.0.0.1:9/v1")
    assert session.run_plain() == 0
    expected = capsys.readouterr().err
    [aside] = settings.history_dir.glob("*damaged*")
    assert "The chat history is damaged. Recovering the readable chats.\n" in expected
    assert "Saved: 0 chats and 0 messages. Lost: the end of its file." in expected
    assert f"The damaged file is kept as {aside}.\n" in expected


def test_notices_are_printed_and_unsaved_state_is_in_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = ScriptedClient()
    client.chats.pending_notices = [Notice("Nothing is saved: the disk is full.", "Make room.", is_saved=False)]
    scripted(client, monkeypatch, "/chats", is_person=True)
    out, err = capsys.readouterr()
    assert "Nothing is saved: the disk is full. Make room.\n" in err
    assert "\n(not saved) > " in out


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("is_person", [True, False])
def test_new_user_gets_a_model_recommendation(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_person: bool
) -> None:
    async def better(models: ChatModels) -> Recommendation:
        return Recommendation("qwen3:8b", "fits: 40k context")

    monkeypatch.setattr(ChatModels, "recommended", better)
    monkeypatch.setattr("sys.stdin", (Person if is_person else io.StringIO)("/help\n/quit\n"))

    async def main() -> int:
        async with clients() as client:
            return await PlainChat(client, Clipboard({})).run()

    assert asyncio.run(main()) == 0
    expected = "This machine can run qwen3:8b. It fits: 40k context.\n/load qwen3:8b downloads it. "
    assert (expected in capsys.readouterr().err) == is_person


@pytest.mark.parametrize(
    ("answer", "is_person", "loaded"),
    [("no", True, []), ("", True, []), ("Yes", True, ["qwen3:4b"]), ("", False, ["qwen3:4b"])],
)
def test_large_download_needs_confirmation(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    is_person: bool,
    loaded: list[str],
) -> None:
    client = ScriptedClient()
    assert scripted(client, monkeypatch, "/load qwen3:4b", answer, is_person=is_person) == 0
    out, _ = capsys.readouterr()
    assert "Size:      about 2.5 GB\nFree disk: 24.5 GB\nMemory:    Probably fits\n" in out
    assert client.models.loaded == loaded
    assert scripted(client, monkeypatch, "/load smollm2:135m", is_person=True) == 0
    assert client.models.loaded == [*loaded, "smollm2:135m"]


def test_private_chat_is_marked_in_prompt_and_lists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = ScriptedClient()
    client.keep("Kept", "a question", "an answer")
    lines = [
        "/private",
        "Hi",
        "/delete",
        "yes",
        "/new",
        "/undo",
        "/chats",
        "/search Hi",
        "/open 1",
        "/chats",
        "/open 2",
        "/new",
    ]
    scripted(client, monkeypatch, *lines, is_person=True)
    out, _ = capsys.readouterr()
    assert "> Private chat: nothing is saved.\nprivate> Hello.\nprivate> Delete " in out
    assert "”? yes or no (/undo restores it until you quit)\nprivate> Deleted." in out
    assert "> New chat.\n> Restored.\nprivate> " in out
    assert "2 messages, private)" in out
    assert " (private): You: Hi" in out
    assert " (private):\nYou: Hi" in out
    assert "private> Kept:\n" in out
    assert out.endswith("Model: an answer\n> New chat.\n> \n")


@pytest.mark.parametrize(("answer", "num_chats"), [("y", 0), ("no", 1), ("", 1)])
def test_chat_is_deleted_after_the_user_agrees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, num_chats: int
) -> None:
    client = ScriptedClient()
    client.keep("Dragons", "a question", "an answer")
    scripted(client, monkeypatch, "/chats", "/open 1", "/delete", answer, is_person=True)
    assert "> Delete “Dragons”? yes or no (/undo restores it until you quit)\n" in capsys.readouterr().out
    assert len(client.chats.chats) == num_chats


def test_typed_names_have_no_control_characters_in_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    client = ScriptedClient()
    client.keep("Dragons", "a question", "an answer")
    scripted(client, monkeypatch, "/chats", "/open 1", f"/export {tmp_path}/a\x1b]0;owned\x07.md")
    out, err = capsys.readouterr()
    assert "a␛]0;owned␇.md." in out
    assert "\x1b" not in out + err


def test_first_chat_can_be_private(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/new\nHello\n"))
    asyncio.run(PlainChat(client, Clipboard({}), is_private=True).run())
    assert [chat.summary.private for chat in client.chats.chats.values()] == [True, False]


def test_draft_is_listed_as_draft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    client = ScriptedClient()
    client.context.limit = 100
    scripted(client, monkeypatch, "Too much", "/chats")
    assert "1. Too much (draft)\n" in capsys.readouterr().out


def test_endpoint_is_not_named_by_the_default_model(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    with FakeEndpoint() as endpoint:
        assert Session(settings, {"stay": False}, endpoint.url).run_plain() == 0
        out, err = capsys.readouterr()
    assert out == "Hello.\n"
    assert "smollm2" not in err
    assert f"{endpoint.url}: connecting\n" in err


def test_ctrl_c_stops_loading_and_returns_to_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[str] = []

    async def load(models: ScriptedModels, name: str) -> AsyncGenerator[Loading, None]:
        try:
            yield Loading(name, "fetching", 0.1)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    monkeypatch.setattr(ScriptedModels, "load", load)
    assert scripted(ScriptedClient(), monkeypatch, "/load qwen3:4b", "yes", "Hi", is_person=True) == 0
    out, err = capsys.readouterr()
    assert ended == ["qwen3:4b"]
    assert "qwen3:4b: fetching, 10 %\n\n> Hello.\n" in out
    assert err.endswith("Stopped.\n")


CALL = ToolCalled(CallId("1"), "files__read", '{"path": "a.txt"}', asks=True)
WITH_CALL: Script = [
    TextDelta("Let me look. "),
    CALL,
    ToolReturned(CALL.call, "one\ntwo\n" + "x" * 1000),
    TextDelta("Two lines."),
    ReplyEnd(Finish.COMPLETE),
]


@pytest.mark.parametrize(
    ("answer", "permission"),
    [
        ("y", Permission.ONCE),
        ("chat", Permission.CHAT),
        ("Always", Permission.ALWAYS),
        ("n", Permission.DENY),
        ("", Permission.DENY),
        ("what?", Permission.DENY),
    ],
)
def test_tool_call_asks_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, permission: Permission
) -> None:
    client = ScriptedClient(WITH_CALL)
    scripted(client, monkeypatch, "Hi", answer, is_person=True)
    assert client.tools.answers == [(CALL.call, permission)]
    out, err = capsys.readouterr()
    assert "Let me look. \nAllow this call? y: once, chat: in this chat, always: in all chats, N: no\n" in out
    assert 'Tool: files__read {"path": "a.txt"}\n' in err
    [result] = [line for line in err.splitlines() if line.startswith("Result: one two xxx")]
    assert result.endswith("x … (1,008 characters)")


def test_tool_call_in_a_pipe_is_denied(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    client = ScriptedClient(WITH_CALL)
    scripted(client, monkeypatch, "Hi", "y")
    assert client.tools.answers[0] == (CALL.call, Permission.DENY)
    assert "Allow" not in capsys.readouterr().out


SERVERS = [
    ToolServer("files", "ready", "", (ToolInfo("files__read", "Read a file.", True), ToolInfo("files__write", ""))),
    ToolServer("web", "failed", "The command was not found: npx."),
]


def test_tools_command_lists_and_switches_tools(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = ScriptedClient()
    client.tools.listed = SERVERS
    changes = ["/tools off files__write", "/tools revoke files__read", "/tools restart web"]
    wrong = ["/tools off nothing", "/tools off", "/tools restart nothing", "/tools burn files__read"]
    scripted(client, monkeypatch, *changes, "/tools", *wrong)
    out, err = capsys.readouterr()
    [chat] = client.chats.chats.values()
    assert chat.settings.disabled_tools == {"files__write"}
    assert (client.tools.revoked, client.tools.restarted) == (["files__read"], ["web"])
    expected = ["files: ready", "  files__read: on, always allowed. Read a file.", "  files__write: off."]
    expected += ["web: failed: The command was not found: npx."]
    assert "\n".join(expected) in out
    assert "Tool servers are configured in /home/me/.config/inglenook/mcp.json.\n" in out
    assert err.count("error: ") == len(wrong)


def test_tools_command_fits_the_terminal_and_counts_tools_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    client = ScriptedClient()
    client.tools.listed = [ToolServer("web", "ready", "", (ToolInfo("web__get", "word " * 90),), 7)]
    scripted(client, monkeypatch, "/tools")
    lines = capsys.readouterr().out.splitlines()
    assert "web: ready, 7 tools left out" in lines
    [described] = [line for line in lines if line.startswith("  web__get: on.")]
    assert len(described) == 60
    assert described.endswith("…")


def test_branches_are_listed_and_shown_by_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = ScriptedClient()
    client.engine.loads.set()
    scripted(client, monkeypatch, "First", "/branches", "/edit Second", "/branches", "/branches 1", "/branches 9")
    out, err = capsys.readouterr()
    assert "This chat has no other branches." in out
    assert "1. You: First\n2. You: Second (shown)\n/branches NUMBER shows one.\n" in out
    assert out.rstrip().rpartition("/branches NUMBER shows one.")[2].lstrip().startswith("You: First\nModel: ")
    assert "this chat has no branch with this number" in err


def test_last_reply_is_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = tmp_path / "xclip"
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/copied\n", encoding="utf-8")
    program.chmod(0o755)
    client = ScriptedClient()
    client.engine.loads.set()
    monkeypatch.setattr("sys.stdin", io.StringIO("/copy\nHi\n/copy\n"))
    clipboard = Clipboard({"PATH": f"{tmp_path}:/usr/bin:/bin", "DISPLAY": ":0"})
    asyncio.run(PlainChat(client, clipboard).run())
    out, err = capsys.readouterr()
    assert "error: no reply to copy" in err
    assert Destination.CLIPBOARD.value in out
    assert (tmp_path / "copied").read_text(encoding="utf-8") in out


def test_copy_without_a_clipboard_program_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = ScriptedClient()
    client.engine.loads.set()
    scripted(client, monkeypatch, "Hi", "/copy")
    assert "Install wl-copy, xclip, or xsel." in capsys.readouterr().err


def test_new_chats_start_with_the_default_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    client, brief = ScriptedClient(), ChatSettings("Be brief.")
    client.chats.kept_presets[DEFAULT_PRESET] = Preset(DEFAULT_PRESET, brief)
    client.engine.loads.set()
    assert scripted(client, monkeypatch, "/system Be kind.", "/new", "hi") == 0
    assert [chat.settings for chat in client.chats.chats.values()] == [ChatSettings("Be kind."), brief]
