"""The chat in plain lines: what a pipe or a voice is given, and nothing else."""

import asyncio
import io
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from app.config import Settings
from app.history.database import FILE_NAME
from app.history.history import History
from app.terminal_chat.loading_lines import LoadingLines
from app.terminal_chat.models import ChatModels
from app.terminal_chat.plain_chat import PlainChat
from app.terminal_chat.session import Session
from app.terminal_chat.whole_words import WholeWords
from tests.app.terminal_chat.conftest import Clients
from tests.tui.scripted_client import ScriptedClient, ScriptedModels
from tui.commands import COMMANDS
from tui.engine_nouns import Loading, Recommendation


class Person(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(clients: Clients, monkeypatch: pytest.MonkeyPatch, *lines: str, question: str = "") -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    async def main() -> int:
        async with clients() as client:
            return await PlainChat(client, question).run()

    return asyncio.run(main())


def scripted(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch, *lines: str, is_person: bool = False) -> int:
    """The exit status of a chat over a client whose answers are known."""
    monkeypatch.setattr("sys.stdin", (Person if is_person else io.StringIO)("".join(f"{line}\n" for line in lines)))
    return asyncio.run(PlainChat(client).run())


@pytest.mark.usefixtures("running")
def test_a_conversation_through_a_pipe(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def short() -> None:
        from tui.nouns import ChatSettings, Preset, Sampling

        async with clients() as client:
            await client.chats.keep_preset(Preset("short", ChatSettings(sampling=Sampling(max_tokens=5, seed=1))))

    asyncio.run(short())
    file = tmp_path / "chat.md"
    commands = ["/preset short", "Hi", "/regenerate", "/title Greeting", "/pin", f"/export {file}", "/chats", "/delete"]
    status = said(
        clients, monkeypatch, *commands, "/undo", "/search Hi", "/new", "/chats", "/open 1", "/quit", "unread"
    )
    out, err = capsys.readouterr()
    assert status == 0
    assert "1. Greeting (3 messages, pinned)" in out
    assert out.count("Deleted. /undo brings it back.\nThe chat is back.\n1. Greeting: Hi") == 1
    assert file.read_text(encoding="utf-8").startswith("# Greeting\n")
    assert err.count("The limit of tokens ended the reply.") == 2
    assert "You: Hi" in out
    assert "unread" not in out
    assert "\x1b" not in out + err


@pytest.mark.usefixtures("running")
def test_what_fails_is_told_and_is_the_status(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(clients, monkeypatch, "/nothing", "/open 3", "/export", "/preset x", "/undo", "/regenerate") == 1
    out, err = capsys.readouterr()
    assert err.count("error: ") == 6
    assert "there is no command /nothing here" in err
    assert "\ntry: /help lists those there are.\n" in err
    assert out == ""


def test_without_a_model_the_reason_is_told(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from app.terminal_chat.engine_process import EngineFailed, EngineProcess

    def fail(*given: object) -> None:
        raise EngineFailed("the model is not there", "ingle pull it")

    monkeypatch.setattr(EngineProcess, "start", fail)
    assert said(clients, monkeypatch, question="Hi") == 1
    assert "error: the model is not there\ntry: ingle pull it\n" in capsys.readouterr().err


def test_help_has_the_table_of_the_screens(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said(clients, monkeypatch, "/help")
    out = capsys.readouterr().out
    assert sum(f"/{command.name} {command.takes}".rstrip() + f": {command.help}\n" in out for command in COMMANDS) > 15


def test_loading_is_told_in_a_line_every_few_seconds() -> None:
    times = iter([0.0, 0.1, 4.0, 6.0, 12.0])
    lines = LoadingLines(lambda: next(times))
    states = [Loading("m", "starting")] + [Loading("m", "fetching", share) for share in (0.1, 0.2, 0.3, 0.3)]
    assert [lines.line(state) for state in states] == ["m: starting", "", "", "m: fetching, 30%", ""]


def test_words_come_whole() -> None:
    words = WholeWords()
    assert words.add("one tw") == ""
    assert words.add("o\nthr") == "one two\n"
    assert words.add("ee " + "four " * 30) == "three " + "four " * 30
    assert words.add("fi") == ""
    assert words.rest() == "fi"
    assert words.rest() == ""


def test_a_damaged_history_is_told_of(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.history_dir.mkdir(parents=True)
    (settings.history_dir / FILE_NAME).write_bytes(b"no database at all, and of some length")
    monkeypatch.setattr("sys.stdin", io.StringIO("/quit\n"))
    session = Session(settings, {"stay": False}, "http://127.0.0.1:9/v1")
    assert session.run_plain(History(settings.history_dir)) == 0
    told = capsys.readouterr().err
    assert "damaged: 0 chats and 0 messages of it could be read; the old file is " in told
    assert list(settings.history_dir.glob("*damaged*"))


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("is_person", [True, False])
def test_a_person_who_is_new_is_told_of_a_better_model(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_person: bool
) -> None:
    async def better(models: ChatModels) -> Recommendation:
        return Recommendation("qwen3:8b", "fits: 40k context")

    monkeypatch.setattr(ChatModels, "recommended", better)
    monkeypatch.setattr("sys.stdin", (Person if is_person else io.StringIO)("/help\n/quit\n"))

    async def main() -> int:
        async with clients() as client:
            return await PlainChat(client).run()

    assert asyncio.run(main()) == 0
    told = "A better model fits this machine: qwen3:8b. It fits: 40k context.\n/load qwen3:8b fetches it. "
    assert (told in capsys.readouterr().err) == is_person


def test_ctrl_c_ends_a_loading_and_gives_the_prompt_back(
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
    assert scripted(ScriptedClient(), monkeypatch, "/load qwen3:4b", "Hi", is_person=True) == 0
    out, err = capsys.readouterr()
    assert ended == ["qwen3:4b"]
    assert "qwen3:4b: fetching, 10%\n\n> Hello.\n" in out
    assert err.endswith("Stopped.\n")
