"""Encoding in pieces: where texts are cut, the limit of tokens, and the places to stop."""

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
    """The caller is gone."""


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "PIECE", PIECE)
    monkeypatch.setattr(long_texts, "COUNTED", 300)


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Nearly every character is a token."""
    return from_gguf(metadata())


def calls(allowed: int) -> Callable[[], None]:
    """A check that raises after some calls."""
    left = [allowed]

    def check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Abandoned

    return check


@pytest.mark.parametrize("text", ["x y " * 500, "9" * 2000, " " * 2000])
def test_encoding_stops_when_the_caller_is_gone(tokenizer: Tokenizer, text: str) -> None:
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
def test_a_text_within_its_limit_is_encoded_whole(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode_plain(text, at_start=True, limit=TextLimit(800)) == tokenizer.encode_piece(
        text, at_start=True
    )


def test_text_without_a_limit_is_encoded_once(tokenizer: Tokenizer) -> None:
    assert tokenizer.splits_at_words  # which encodes a few words to find out
    before = tokenizer.characters_encoded
    tokenizer.encode_plain("9" * 2000, at_start=True, limit=TextLimit(check=calls(10)))
    assert tokenizer.characters_encoded - before == 2000


def test_a_prompt_that_is_not_much_too_long_is_counted_exactly(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("9" * 290, limit=TextLimit.of_context(100))) == 290
    assert len(tokenizer.encode("9" * 590, limit=TextLimit.of_context(300))) == 590
    with pytest.raises(TextTooLong):
        tokenizer.encode("9 x" * 200, limit=TextLimit.of_context(100))


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextTooLong) as raised:
        tokenizer.encode("9" * 1000, limit=TextLimit.of_context(10))
    assert raised.value.least == 1000 // tokenizer.longest_token
    assert tokenizer.characters_encoded == 0


def test_texts_are_not_cut_where_a_token_reaches_across() -> None:
    """In a vocabulary whose words may be letters with spaces between them."""
    tokens = (*BYTES, "dĠ", "<|bos|>", "<|im_end|>")
    ids = {"bos_token_id": tokens.index("<|bos|>"), "eos_token_id": tokens.index("<|im_end|>")}
    joining = from_gguf(metadata(tokens=tokens, token_type=None, merges=("d Ġ",), pre="exaone-moe", **ids))
    text = "d " * 1000
    assert joining.encode_piece("d d", at_start=True)[0] == tokens.index("dĠ")
    assert joining.encode_plain(text, at_start=True) == joining.encode_piece(text, at_start=True)


class Words:
    """One id for each word, and none for the blanks between them."""

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
def test_the_beginning_of_a_text_needs_no_more_than_that(text: str) -> None:
    words, all_words = Words(), text.split()
    ids = encode_prefix(words, text, 30, calls(10))
    assert list(ids[:30]) == [len(word) for word in all_words[:30]]
    assert words.encoded < 2 * PIECE + 30 * words.longest_token or len(all_words) < 30


def test_the_ids_of_all_pieces_are_those_of_the_text() -> None:
    text = "a bc " * 9000
    assert list(encode_long(Words(), text, at_start=True)) == [1, 2] * 9000
