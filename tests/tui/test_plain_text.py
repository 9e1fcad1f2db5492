"""Tests that shown text cannot control the terminal or hide characters, and that harmless text is unchanged."""

import random
import re

import pytest

from tui.plain_text import break_paths, capitalized, model_name, sanitize, shortened, single_line, start, without_fences

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;cHduZWQ=\x07", "␛]52;c;cHduZWQ=␇"),  # OSC 52, which writes to the clipboard
        ("\x9b31m", "‹U+009B›31m"),  # CSI as a single C1 character
        ("a\r\nb\u2028c\u2029d", "a\nb\nc\nd"),
        ("a\rb\x7f", "a␍b␡"),
        ("\u202egnp.exe", "‹U+202E›gnp.exe"),  # right-to-left override
        ("pass\u200bword\ufeff", "pass‹U+200B›word‹U+FEFF›"),
        ("\U000e0041\ud800\x00", "‹U+E0041›\ufffd␀"),  # a tag character, a lone surrogate, and NUL
        ("a\u200db \u200d", "a‹U+200D›b ‹U+200D›"),  # joiners that have nothing to join
    ],
)
def test_hidden_and_control_characters_are_made_visible(text: str, shown: str) -> None:
    assert sanitize(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "tab\tand\nnewline",
        "naïve Ω 漢字 한국어 עברית العربية",
        "👨\u200d👩\u200d👧 ❤\ufe0f",
        "می\u200cخواهم",
        "\u200d👧",  # the end of an emoji whose start arrived earlier
        "[/] [b]x[/b] `code`",
    ],
)
def test_harmless_text_is_unchanged(text: str) -> None:
    assert sanitize(text) is text or sanitize(text) == text


def test_sanitized_text_has_no_controls_and_is_stable() -> None:
    for _ in range(300):
        text = "".join(chr(random.choice((random.randrange(0x300), random.randrange(0x110000)))) for _ in range(40))
        shown = sanitize(text)
        assert not CONTROLS.search(shown)
        assert sanitize(shown) == shown
        shown.encode("utf-8")


def test_sanitizing_parts_hides_no_character() -> None:
    text = "a\x1b[31m\u202eb\u200bc\x9b\U000e0041"
    for place in range(len(text)):
        assert sanitize(text[:place]) + sanitize(text[place:]) == sanitize(text)


def test_title_is_one_line() -> None:
    assert single_line(" a\tb\r\nc\x1b ") == "a b c␛"


def test_shortened_text_keeps_both_ends() -> None:
    assert shortened("org/Model:Q4_0", 14) == "org/Model:Q4_0"
    assert shortened("org/Model:Q4_0", 9) == "org/…Q4_0"
    assert shortened("org/Model:Q4_0", 8) == "org/…4_0"


def test_model_name_is_the_last_part_of_a_path_without_gguf() -> None:
    assert model_name("/home/ann/models/Model.Q4_K_M.gguf") == "Model.Q4_K_M"
    assert model_name("Model.Q4_K_M.gguf") == model_name("models/Model.Q4_K_M.gguf") == "Model.Q4_K_M"
    for name in ("org/repository:Q4_K_M", "smollm2:135m", "https://host/Model.gguf", ""):
        assert model_name(name) == name


def test_fences_of_code_blocks_are_removed() -> None:
    assert start(without_fences("Use:\n```python\nx = 1\n```\nor `y`."), 60) == "Use: x = 1 or `y`."


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("the server does not respond", "The server does not respond"),
        ("smollm2:135m is not installed", "smollm2:135m is not installed"),
        ("huggingface.co cannot be reached", "huggingface.co cannot be reached"),
        ("/home/me/a.txt: no such file", "/home/me/a.txt: no such file"),
        ("", ""),
    ],
)
def test_messages_start_with_a_capital_unless_they_start_with_a_name(message: str, shown: str) -> None:
    assert capitalized(message) == shown


def test_long_paths_are_broken_after_slashes() -> None:
    path = "/home/ann/notes/of the week/export.json"
    assert break_paths(f"Saved to {path}", 37) == f"Saved to {path}"
    assert break_paths("Saved to /home/ann/notes/export.json", 20) == "Saved to /home/ann/notes/\nexport.json"
    assert break_paths("/home/ann/notes/export.json", 12) == "/home/ann/\nnotes/\nexport.json"
    assert break_paths("averylongword/x", 6) == "averylongword/\nx"
