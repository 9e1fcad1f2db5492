"""The prompt of `ingle run` from its argument, from a pipe, and from both."""

import os
from pathlib import Path

import click
import pytest

from app.commands.run_prompt import NoPreviousRun, previous_run, read_question, save_run
from app.generation.conversation import Message
from app.settings.settings import load_settings


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


def test_saved_run_is_read_back(tmp_path: Path) -> None:
    with pytest.raises(NoPreviousRun):
        previous_run(tmp_path)
    settings = load_settings(model="qwen3:4b", state_dir=tmp_path)
    save_run(settings, [Message("system", "s"), Message("user", "u")], "a")
    model, messages = previous_run(tmp_path)
    assert model == "qwen3:4b"
    assert [(message.role, message.content) for message in messages] == [
        ("system", "s"),
        ("user", "u"),
        ("assistant", "a"),
    ]
    (tmp_path / "last-run.json").write_bytes(b"[{]")
    with pytest.raises(NoPreviousRun):
        previous_run(tmp_path)


def test_path_of_a_model_is_saved_as_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    save_run(load_settings(model="./model.gguf", state_dir=tmp_path), [Message("user", "u")], "a")
    assert previous_run(tmp_path)[0] == str(tmp_path / "model.gguf")
