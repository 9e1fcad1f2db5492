import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.terminal_text import sanitize

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # includes lone surrogates


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x1b[0m", "[31mred[0m"),
        ("\x1b]8;;http://x\x07link\x1b]8;;\x07", "]8;;http://xlink]8;;"),
        ("\x9b2Jgone", "2Jgone"),
        ("a\rb\r\nc\bd\x7f", "ab\ncd"),
        ("a\tb\n", "a\tb\n"),
        ("\u202eevil\u202c \u2066x\u2069", "evil x"),
        ("hidden\U000e0041\U000e007f", "hidden"),
        ("\ud83d!", "\ufffd!"),
        ("👩\u200d💻 نمی\u200cخواهم", "👩\u200d💻 نمی\u200cخواهم"),
    ],
)
def test_terminal_control_sequences_are_removed(text: str, expected: str) -> None:
    assert sanitize(text) == expected


@given(ANY_TEXT)
def test_no_control_character_remains(text: str) -> None:
    left = set(sanitize(text))
    assert not {c for c in left if unicodedata.category(c) in ("Cc", "Cs")} - {"\n", "\t"}
    assert not {c for c in left if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "PDI")}


@given(ANY_TEXT, ANY_TEXT)
def test_sanitized_pieces_equal_the_sanitized_text(first: str, second: str) -> None:
    assert sanitize(first) + sanitize(second) == sanitize(first + second)


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Z", "M"])))
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert sanitize(text) == text
