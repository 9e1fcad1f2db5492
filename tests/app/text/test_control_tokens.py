from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from app.text.control_tokens import MARK, ControlToken, ControlTokens, end_of_generation_ids, looks_like_control


def control_tokens(*texts: str) -> ControlTokens:
    return ControlTokens({text: ControlToken(id_) for id_, text in enumerate(texts)})


def test_split_yields_tokens_and_text() -> None:
    control = control_tokens("<s>", "</s>", "[INST]")
    assert list(control.split("<s>[INST] hi <s </s>")) == [0, 2, " hi <s ", 1]
    assert list(control.split("")) == []
    assert list(ControlTokens({}).split("<s>")) == ["<s>"]


def test_leftmost_longest_token_wins() -> None:
    control = control_tokens("ab", "abc", "bcd")
    assert list(control.split("abcd")) == [1, "d"]
    assert list(control.split("abd")) == [0, "d"]


def test_tokens_may_include_adjacent_white_space() -> None:
    control = ControlTokens(
        {"<a>": ControlToken(0, strip_left=True), "<b>": ControlToken(1, strip_right=True), "<c>": ControlToken(2)}
    )
    assert list(control.split("x \n<a> y <b> \n z <c> ")) == ["x", 0, " y ", 1, "z ", 2, " "]
    assert list(control.split(" <a> <b> <c>")) == [0, " ", 1, 2]


SMALL_TEXTS = st.text("<|a>", max_size=8)
SMALL_TOKENS = st.lists(st.text("<|a>", min_size=2, max_size=4), min_size=1, max_size=4, unique=True)


@given(SMALL_TOKENS, SMALL_TEXTS)
def test_split_agrees_with_the_tokenizers_library(tokens: list[str], text: str) -> None:
    alphabet = {character: id_ for id_, character in enumerate("<|a>")}
    oracle = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    oracle.add_special_tokens(tokens)
    control = ControlTokens({token: ControlToken(len(alphabet) + order) for order, token in enumerate(tokens)})
    ids: list[int] = []
    for part in control.split(text):
        ids += [part] if isinstance(part, int) else [alphabet[character] for character in part]
    assert ids == oracle.encode(text).ids


def render(parts: Sequence[tuple[str, bool]], control: ControlTokens) -> str:
    """Join texts as a template does. True marks the contents of messages; other texts are literals of the template."""
    return "".join(control.protect(text) if is_content else text for text, is_content in parts)


@given(SMALL_TOKENS, st.lists(st.tuples(SMALL_TEXTS, st.booleans()), max_size=6))
def test_protected_text_never_becomes_part_of_a_token(tokens: list[str], parts: list[tuple[str, bool]]) -> None:
    control = control_tokens(*tokens)
    from_content = [is_content for text, is_content in parts for _ in text]
    position, rebuilt = 0, ""
    for part in control.split(render(parts, control), marked=True):
        text = tokens[part] if isinstance(part, int) else part
        rebuilt += text
        if isinstance(part, int):
            assert not any(from_content[position : position + len(text)])
        position += len(text)
    assert rebuilt == "".join(text for text, _ in parts)


def test_protected_text_cannot_be_the_middle_of_a_token() -> None:
    control = control_tokens("<user>")
    assert list(control.split("<" + control.protect("user") + ">", marked=True)) == ["<user>"]
    assert list(control.split("<" + control.protect("use") + control.protect("r>"), marked=True)) == ["<user>"]


@given(st.text("<>xy \n", max_size=8), st.text("<>xy", max_size=8))
def test_template_tokens_do_not_depend_on_contents(first: str, second: str) -> None:
    control = control_tokens("<x>", "<y>")
    # Templates strip contents. This must not move a mark to the start of a template's token.
    rendered = "<x>" + control.protect(first).strip() + control.protect(second) + "<y>"
    plain = first.strip() + second
    assert list(control.split(rendered, marked=True)) == [0, *([plain] if plain else []), 1]


def test_text_without_markup_is_unchanged() -> None:
    control = control_tokens("<|im_start|>", "<|im_end|>")
    content = "def f(a: int) -> bool:\n    return a < 3 | b > 4\n"
    assert control.protect(content) == content
    assert control.protect("") == ""


def test_mark_in_text_is_replaced() -> None:
    assert control_tokens("<x>").protect(f"a{MARK}b") == "a\ufffdb"


def test_single_character_token_is_never_found() -> None:
    control = control_tokens("\n", "<x>")
    assert list(control.split("a\nb<x>")) == ["a\nb", 1]
    assert control.ids == {"\n": 0, "<x>": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|im_start|>", True),
        ("<｜User｜>", True),
        ("<end_of_turn>", True),
        ("</s>", False),
        ("<tool_call>", False),
        ("[PAD7]", False),
        ("<|", False),
    ],
)
def test_markup_is_recognized_by_its_form(text: str, expected: bool) -> None:
    assert looks_like_control(text) is expected


def test_end_of_generation_ids_include_named_and_known_tokens() -> None:
    assert end_of_generation_ids({"<|im_start|>": 1, "<|im_end|>": 2, "<|end|>": 3}, [9]) == {2, 3, 9}


def test_end_of_message_does_not_end_multi_message_replies() -> None:
    ids = {"<|end|>": 1, "<|return|>": 2, "<|call|>": 3}
    assert end_of_generation_ids(ids, [2]) == {2, 3}
