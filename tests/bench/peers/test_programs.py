"""Child processes that answer through pipes."""

import os
import sys
from collections.abc import Callable

import pytest

from app.bench.competitor import CompetitorFailed
from tests.bench.peers.programs import PipedChild, piped_child


def python(statement: str) -> list[str]:
    return [sys.executable, "-u", "-c", statement]


def test_child_answers_each_line() -> None:
    with piped_child("echo", python("import sys\nfor line in sys.stdin: print(line.upper(), end='')")) as echo:
        assert echo.ask(b"one") == b"ONE\n"
        assert echo.ask(b"two") == b"TWO\n"


@pytest.mark.parametrize(
    "act",
    [
        lambda process: process.read_line(),
        lambda process: [process.ask(b"are you there?") for _ in range(1000)],
        lambda process: [os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT), process.ask(b"are you there?")],
    ],
)
def test_dead_child_raises_with_its_stderr(act: Callable[[PipedChild], object]) -> None:
    dying = python("import sys; sys.exit('no such model')")
    with (
        pytest.raises(CompetitorFailed, match=r"dying ended(?s:.*)no such model"),
        piped_child("dying", dying) as process,
    ):
        act(process)
