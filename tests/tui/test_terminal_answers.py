"""Tests that answers of the terminal and unknown keys are never typed into the prompt."""

import pytest
from textual._xterm_parser import XTermParser
from textual.events import Key

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import ScriptedClient
from tui.terminal_answers import AnswerFilter
from tui.widgets.textual_internals import ignore_answers, type_no_alt_digits

BACKGROUND = "\x1b]11;rgb:0000/0000/0000\x1b\\"


@pytest.mark.parametrize(
    ("pieces", "left"),
    [
        ((f"a{BACKGROUND}b",), "ab"),
        (("a\x1b]11;rgb:0000/0000/0000\x07b",), "ab"),
        ((f"a{BACKGROUND[:12]}", f"{BACKGROUND[12:]}b"), "ab"),
        ((f"a{BACKGROUND[:-1]}", f"{BACKGROUND[-1:]}b"), "ab"),
        (("a\x1b]11;rgb", "typed"), "atyped"),
        (("\x1bP1$r0m\x1b\\a",), "a"),
        (("\x1b[?62;22ca\x1b[>0;276;0c",), "a"),
        (("\x1b[99~a",), "a"),
        (("\x1b[3~\x1b[200~pasted\x1b[201~\x1b[15;5~",), "\x1b[3~\x1b[200~pasted\x1b[201~\x1b[15;5~"),
        (("\x1b[?2026;2$y\x1b[<0;3;4M\x1b[97;5u\x1b]\x1ba",), "\x1b[?2026;2$y\x1b[<0;3;4M\x1b[97;5u\x1b]\x1ba"),
    ],
)
def test_answers_and_unknown_keys_are_removed(pieces: tuple[str, ...], left: str) -> None:
    answers = AnswerFilter()
    assert "".join(map(answers.clean, pieces)) == left


def test_parser_of_the_terminal_reports_only_typed_keys() -> None:
    ignore_answers()
    parser = XTermParser()
    pieces = ("a", BACKGROUND, "\x1b[99~", "b")
    keys = [event for piece in pieces for event in parser.feed(piece)]
    assert [event.key for event in keys if isinstance(event, Key)] == ["a", "b"]


def test_alt_with_a_letter_or_digit_types_nothing() -> None:
    async def flow(chat: Chatting) -> None:
        chat.composer.area.focus()
        for key in (Key("alt+x", "x"), Key("alt+1", "1"), Key("y", "y")):
            chat.app.post_message(key)
        await chat.until(lambda: chat.composer.area.text)
        assert chat.composer.area.text == "y"

    run(ScriptedClient(), flow)


def test_alt_with_a_digit_is_not_reported_as_a_character() -> None:
    type_no_alt_digits()
    assert [event for event in XTermParser().feed("\x1b1") if isinstance(event, Key)] == []
