"""Tests of `ingle chat --plain` as a process: signals, and input that is not text."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_endpoint import FakeEndpoint
from tests.support.processes import HANGING_SECONDS, Started
from tests.support.terminal_screen import ROOT, Terminal, children_of, python


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    """A server that sends half of a reply and then no more."""
    with FakeEndpoint([["It ", "goes ", "on."]]) as served:
        served.hold()
        yield served


def folders(place: Path) -> dict[str, str]:
    return {f"INGLE_{name}_DIR": str(place / name) for name in ("STATE", "CACHE", "MODELS")}


def command(endpoint: FakeEndpoint, *more: str) -> list[str]:
    return python("-m", "app", "chat", "--endpoint", endpoint.url, *more)


def asked(endpoint: FakeEndpoint, place: Path) -> Terminal:
    """Start a chat in a terminal, and wait until its reply has started."""
    terminal = Terminal(command(endpoint, "--plain"), folders(place))
    terminal.read_until(lambda output: b"> " in output)
    os.write(terminal.master, b"Hi\r")
    terminal.read_until(lambda output: b"\nIt" in output or len(endpoint.asked) > 0)
    return terminal


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signal_at_the_prompt_ends_the_chat(endpoint: FakeEndpoint, tmp_path: Path, name: str) -> None:
    terminal = Terminal(command(endpoint, "--plain"), folders(tmp_path))
    terminal.read_until(lambda output: b"> " in output)
    os.kill(terminal.pid, getattr(signal, name))
    ended = terminal.ended()
    assert ended.status == 128 + getattr(signal, name)
    assert b"rror" not in ended.output


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signal_during_a_reply_ends_the_chat(endpoint: FakeEndpoint, tmp_path: Path, name: str) -> None:
    terminal = asked(endpoint, tmp_path)
    os.kill(terminal.pid, getattr(signal, name))
    assert terminal.ended().status == 128 + getattr(signal, name)


def test_ctrl_c_stops_the_reply_and_two_more_end_the_chat(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    terminal = asked(endpoint, tmp_path)
    os.write(terminal.master, b"\x03")
    terminal.read_until(lambda output: b"> " in output.partition(b"Stopped.")[2])
    os.write(terminal.master, b"\x03")
    terminal.read_until(lambda output: b"> " in output.partition(b"Press ^c again")[2])
    os.write(terminal.master, b"\x03")
    assert terminal.ended().status == 128 + signal.SIGINT


def piped(endpoint: FakeEndpoint, place: Path, text: bytes, **more: str) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **folders(place), **more}
    pipe = subprocess.PIPE
    process = Started[bytes](command(endpoint), env=environment, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.close()
    process.stdin = None
    return process


def test_ctrl_c_ends_a_chat_with_a_pipe(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    with piped(endpoint, tmp_path, b"One\nTwo\n") as process:
        while not endpoint.asked:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANGING_SECONDS)
    assert process.returncode == 128 + signal.SIGINT
    assert len(endpoint.asked) == 1


def test_input_that_is_not_utf8_gets_a_reply(tmp_path: Path) -> None:
    with FakeEndpoint() as endpoint:
        with piped(endpoint, tmp_path, b"One\nT\xffwo\n", PYTHONIOENCODING="utf-8:strict") as process:
            out, _ = process.communicate(timeout=HANGING_SECONDS)
        assert (process.returncode, out) == (0, b"Hello.\nHello.\n")
        assert [asked["messages"][-1]["content"] for asked in endpoint.asked] == ["One", "T\ufffdwo"]


@pytest.mark.share(1)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_screens_ended_by_a_signal_report_it(endpoint: FakeEndpoint, tmp_path: Path, name: str) -> None:
    terminal = Terminal(command(endpoint), folders(tmp_path))
    terminal.resize(120, 40)
    terminal.read_until(lambda output: b"sk anything" in output)
    os.kill(children_of(terminal.pid)[0], getattr(signal, name))
    ended = terminal.ended()
    assert (ended.status, ended.modes, ended.attributes_are_back) == (128 + getattr(signal, name), frozenset(), True)
