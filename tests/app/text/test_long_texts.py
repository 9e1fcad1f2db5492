"""Encoding of long texts in pieces: positions of the cuts, token limits, and cancellation."""

from collections.abc import Callable, Sequence

import pytest

from app.errors import TextTooLong
from app.text import long_texts
from app.text.gguf_tokenizer import from_gguf
from app.text.long_texts import TextLimit, encode_long, encode_prefix
from app.text.tokenizer import Tokenizer
from tests.app.text.small_vocabulary import BYTES, metadata

PIECE = 100


class Abandoned(Exception):
    """Raised by a check when the caller is gone."""


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "PIECE", PIECE)
    monkeypatch.setattr(long_texts, "COUNTED", 300)


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A tokenizer in which almost every character is a token."""
    return from_gguf(metadata())


def calls(allowed: int) -> Callable[[], None]:
    """Return a check that raises Abandoned after `allowed` calls."""
    left = [allowed]

    def check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Abandoned

    return check


@pytest.mark.parametrize("text", ["x y " * 500, "9" * 2000, " " * 2000])
def test_encoding_stops_when_the_caller_leaves(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(Abandoned):
        tokenizer.encode_plain(text, at_start=True, limit=TextLimit(10_000, check=calls(3)))
    assert tokenizer.characters_encoded < 600


@pytest.mark.parametrize("text", ["x y " * 5000, "9" * 20_000, "x y " * 100 + "9" * 20_000])
def test_encoding_stops_beyond_its_limit(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(TextTooLong) as raised:
        tokenizer.encode_plain(text, at_start=True, limit=TextLimit(1000))
    assert 1000 < raised.value.least <= len(text)
    assert tokenizer.characters_encoded < 2000


@pytest.mark.parametrize("text", ["x y " * 200, "9" * 800])
def test_text_within_its_limit_is_encoded(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode_plain(text, at_start=True, limit=TextLimit(800)) == tokenizer.encode_piece(
        text, at_start=True
    )


def test_text_without_a_limit_is_encoded_once(tokenizer: Tokenizer) -> None:
    assert tokenizer.splits_at_words  # the first use encodes a few words
    before = tokenizer.characters_encoded
    tokenizer.encode_plain("9" * 2000, at_start=True, limit=TextLimit(check=calls(10)))
    assert tokenizer.characters_encoded - before == 2000


def test_slightly_long_prompt_is_counted_exactly(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("9" * 290, limit=TextLimit.of_context(100))) == 290
    assert len(tokenizer.encode("9" * 590, limit=TextLimit.of_context(300))) == 590
    with pytest.raises(TextTooLong):
        tokenizer.encode("9 x" * 200, limit=TextLimit.of_context(100))


def test_very_long_text_is_refused_before_encoding(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextTooLong) as raised:
        tokenizer.encode("9" * 1000, limit=TextLimit.of_context(10))
    assert raised.value.least == 1000 // tokenizer.longest_token
    assert tokenizer.characters_encoded == 0


def test_texts_are_not_split_within_tokens() -> None:
    """In this vocabulary, a letter and the space after it may be one token."""
    tokens = (*BYTES, "dĠ", "<|bos|>", "<|im_end|>")
    ids = {"bos_token_id": tokens.index("<|bos|>"), "eos_token_id": tokens.index("<|im_end|>")}
    joining = from_gguf(metadata(tokens=tokens, token_type=None, merges=("d Ġ",), pre="exaone-moe", **ids))
    text = "d " * 1000
    assert joining.encode_piece("d d", at_start=True)[0] == tokens.index("dĠ")
    assert joining.encode_plain(text, at_start=True) == joining.encode_piece(text, at_start=True)


class Words:
    """A tokenizer with one id per word, and none for blanks."""

    longest_token = 5
    splits_at_words = True

    def __init__(self) -> None:
        self.encoded = 0

    def encode_piece(self, text: str, *, at_start: bool) -> Sequence[int]:
        self.encoded += len(text)
        return [len(word) for word in text.split()]

    def continue_piece(self, text: str) -> Sequence[int]:
        return self.encode_piece(text, at_start=False)


@pytest.mark.parametrize("text", ["a bc " * 9000, "<> " * 15_000, " " * 10_000 + "bc a" + " " * 1000])
def test_prefix_encodes_only_the_needed_pieces(text: str) -> None:
    words, all_words = Words(), text.split()
    ids = encode_prefix(words, text, 30, calls(10))
    assert list(ids[:30]) == [len(word) for word in all_words[:30]]
    assert words.encoded < 2 * PIECE + 30 * words.longest_token or len(all_words) < 30


def test_ids_of_pieces_equal_ids_of_the_text() -> None:
    text = "a bc " * 9000
    assert list(encode_long(Words(), text, at_start=True)) == [1, 2] * 9000
