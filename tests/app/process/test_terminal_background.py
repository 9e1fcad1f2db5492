"""Detection of a dark terminal background, from the terminal's answer or from COLORFGBG."""

import pytest

from app.process import terminal_background
from app.process.terminal_background import is_background_dark, parse_background


@pytest.mark.parametrize(
    ("answer", "is_dark"),
    [
        (b"\x1b]11;rgb:ffff/ffff/ffff\x1b\\\x1b[?62;c", False),
        (b"\x1b]11;rgb:1717/1414/1212\x07", True),
        (b"\x1b]11;rgba:ff/fb/f0/ff\x1b\\", False),
        (b"\x1b[?1;2c", None),
        (b"", None),
    ],
)
def test_background_is_read_from_the_answer_of_the_terminal(answer: bytes, is_dark: bool | None) -> None:
    assert parse_background(answer) is is_dark


@pytest.mark.parametrize(("stated", "is_dark"), [("15;0", True), ("0;15", False), ("0;default;7", False), ("", True)])
def test_colorfgbg_decides_if_the_terminal_does_not_answer(
    stated: str, is_dark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_background, "_ask", lambda: b"")
    assert is_background_dark(stated) is is_dark
