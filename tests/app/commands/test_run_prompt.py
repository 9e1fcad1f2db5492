"""The prompt of `ingle run` from its argument, from a pipe, and from both."""

import os
from pathlib import Path

import click
import pytest

from app.commands.run_prompt import NoPreviousRun, previous_messages, read_question, save_messages
from app.generation.conversation import Message


@pytest.mark.parametrize(
    ("argument", "piped", "question"),
    [
        ("Summarize this.", "a\nb\n", "Summarize this.\n\na\nb"),
        ("Summarize this.", " \n", "Summarize this."),
        ("-", "a\n", "a"),
        (None, "a\n", "a"),
    ],
)
def test_piped_text_is_appended_to_the_argument(
    argument: str | None, piped: str, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.write(writer, piped.encode())
    os.close(writer)
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert read_question(argument) == question


def test_stdin_from_a_device_is_not_read_beside_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/zero") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        assert read_question("Hello") == "Hello"


def test_empty_prompt_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        for argument in (None, "-", " "):
            with pytest.raises(click.UsageError):
                read_question(argument)


def test_saved_messages_are_read_back(tmp_path: Path) -> None:
    with pytest.raises(NoPreviousRun):
        previous_messages(tmp_path)
    save_messages(tmp_path, [Message("system", "s"), Message("user", "u")], "a")
    messages = previous_messages(tmp_path)
    assert [(message.role, message.content) for message in messages] == [
        ("system", "s"),
        ("user", "u"),
        ("assistant", "a"),
    ]
    (tmp_path / "last-run.json").write_bytes(b"[{]")
    with pytest.raises(NoPreviousRun):
        previous_messages(tmp_path)
