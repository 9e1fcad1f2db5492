from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from app.text.control_tokens import ControlToken, ControlTokens
from app.text.detokenizer import IncrementalDetokenizer
from app.text.tokenizer import TextEncoder, Tokenizer, Vocabulary


def latin1_tokenizer(tokens: Sequence[bytes], *, space_prefix: bool = False) -> Tokenizer:
    """Return a tokenizer for `tokens`, by index, with the control token <end> as the last id."""
    end = len(tokens)
    vocabulary = Vocabulary(
        texts=[*(token.decode("latin-1") for token in tokens), "<end>"],
        to_bytes=lambda text: text.encode("latin-1"),
        control=ControlTokens({"<end>": ControlToken(end)}),
        verbatim=frozenset([end]),
        hidden=frozenset([end]),
        bos_id=None,
        eos_id=end,
        end_of_generation_ids=frozenset([end]),
        add_bos=False,
        space_prefix=space_prefix,
        chat_template=None,
    )
    return Tokenizer(TextEncoder(tokenizers.Tokenizer(tokenizers.models.BPE())), vocabulary)


def detokenizer(tokens: Sequence[bytes], stop: Sequence[str] = (), **options: bool) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(latin1_tokenizer(tokens), stop, **options)


def deltas(detokenizer: IncrementalDetokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.finish()]


def cut_at_stop(text: str, stop: Sequence[str], *, include: bool = False) -> tuple[str, str | None]:
    """Return `text` before the stop string that is complete first, found character by character, and that string."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            found = max(ending, key=len)
            return text[:end] if include else text[: end - len(found)], found
    return text, None


# Few letters, so that stop strings are frequent; characters of two and four bytes; and invalid UTF-8.
PIECES = st.sampled_from(
    [b"a", b"b", b"ab", b"ba", b"aab", " ä".encode(), "🦙".encode(), b"\xc3", b"\xff", b"\xf0\x9f"]
)
STOPS = st.lists(st.text("abä🦙\ufffd", min_size=1, max_size=4), max_size=4)


@st.composite
def tokenized_bytes(draw: st.DrawFn) -> list[bytes]:
    """Random bytes, split at random positions."""
    whole = b"".join(draw(st.lists(PIECES, max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@given(tokenized_bytes(), STOPS, st.booleans())
def test_text_ends_before_the_first_stop_string(tokens: list[bytes], stop: list[str], include: bool) -> None:
    under_test = detokenizer(tokens, stop, include_stop=include)
    text = "".join(deltas(under_test, range(len(tokens))))
    whole = b"".join(tokens).decode(errors="replace")
    assert (text, under_test.stopped) == cut_at_stop(whole, stop, include=include)


@given(tokenized_bytes(), STOPS)
def test_text_is_returned_once_certain(tokens: list[bytes], stop: list[str]) -> None:
    under_test = detokenizer(tokens, stop)
    given_text = b""
    text = ""
    for id_, token in enumerate(tokens):
        given_text += token
        text += under_test.push(id_)
        if under_test.stopped is None:
            # Every text that is held back is the start of a stop string or of a character.
            whole = given_text.decode(errors="replace")
            held = whole[len(text) :]
            characters = held.removesuffix("\ufffd")
            assert not characters or any(s.startswith((characters, held)) for s in stop)


def test_partial_character_is_held_back() -> None:
    llama = "🦙".encode()
    assert deltas(detokenizer([llama[:1], llama[1:3], llama[3:]]), range(3)) == ["", "", "🦙", ""]


def test_invalid_bytes_are_replaced_at_once() -> None:
    assert deltas(detokenizer([b"\xff", b"\xc3", b"a"]), range(3)) == ["\ufffd", "", "\ufffda", ""]
    assert deltas(detokenizer([b"a", b"\xf0\x9f"]), range(2)) == ["a", "", "\ufffd"]


def test_possible_stop_string_is_held_back() -> None:
    under_test = detokenizer([b"x\nUs", b"er:", b" hi"], ["\nUser:"])
    assert deltas(under_test, [0, 2]) == ["x", "\nUs hi", ""]
    assert under_test.stopped is None
    under_test = detokenizer([b"x\nUs", b"er:", b" hi"], ["\nUser:"])
    assert deltas(under_test, [0, 1, 2]) == ["x", "", "", ""]
    assert under_test.stopped == "\nUser:"


def test_first_complete_stop_string_wins() -> None:
    under_test = detokenizer([b"abcd"], ["bcd", "c"])
    assert deltas(under_test, [0]) == ["ab", ""]
    assert under_test.stopped == "c"
    under_test = detokenizer([b"abcd"], ["c", "abc"])
    assert deltas(under_test, [0]) == ["", ""]
    assert under_test.stopped == "abc"


def test_stop_string_can_be_included() -> None:
    assert deltas(detokenizer([b"a EN", b"D b"], ["END"], include_stop=True), range(2)) == ["a ", "END", ""]


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        detokenizer([], [""])


def test_control_tokens_are_shown_only_on_request() -> None:
    assert deltas(detokenizer([b"a"]), [0, 1]) == ["a", "", ""]
    assert deltas(detokenizer([b"a"], show_control=True), [0, 1]) == ["a", "<end>", ""]


def test_leading_space_is_stripped_unless_text_continues() -> None:
    tokenizer = latin1_tokenizer([b" Hello", b" world"], space_prefix=True)
    assert "".join(deltas(IncrementalDetokenizer(tokenizer), [0, 1])) == tokenizer.decode([0, 1]) == "Hello world"
    continuing = IncrementalDetokenizer(tokenizer, continues_text=True)
    assert "".join(deltas(continuing, [0, 1])) == tokenizer.decode([0, 1], continues_text=True) == " Hello world"


@pytest.mark.parametrize("stop", [(), ("xyz",)])
def test_incomplete_character_of_an_interrupted_reply_is_left_out(stop: Sequence[str]) -> None:
    for is_interrupted, end in ((True, "a"), (False, "a\ufffd")):
        text = detokenizer([b"a", "א".encode()[:1]], stop)
        assert text.push(0) + text.push(1) + text.finish(is_interrupted=is_interrupted) == end
