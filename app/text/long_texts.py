"""Encodes long texts in pieces, so that encoding can stop at a limit or when its caller is gone.

A piece ends before a space between two words. No token crosses that position, so the ids are those of the whole text. A
stretch without such a position is encoded at once. If tokens are limited, their number is estimated first.
"""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.errors import TextTooLong

PIECE = 1 << 15  # minimum length of a piece in characters
COUNTED = 1 << 17  # number of tokens up to which a text that is too long is counted exactly, for its error

_WORD = re.compile(r"(?<=[A-Za-z0-9,.]) (?=[A-Za-z0-9])")
# the last class has the forms of a space in vocabularies: plain, Ġ, or ▁
_REACHES_ACROSS = re.compile("[A-Za-z0-9,.][ \u0120\u2581]")
_SAMPLE = ("Two words", " and 3", " more, or", " 25.", " End1", " x")


def _no_check() -> None:
    """Do nothing. The default check, for work that cannot be canceled."""


@dataclass(frozen=True, slots=True)
class TextLimit:
    """Limits that apply when a text is encoded."""

    tokens: int | None = None  # limit of the tokens: texts that certainly have more are refused
    counted: int | None = None  # encoding stops beyond this number of tokens; None: `tokens`
    check: Callable[[], None] = _no_check  # called between pieces; raises to end the work

    @classmethod
    def of_context(cls, tokens: int, check: Callable[[], None] = _no_check) -> "TextLimit":
        """Return the limit for a prompt in a context of `tokens` tokens."""
        return cls(tokens, max(2 * tokens, COUNTED), check)

    @property
    def stop_after(self) -> int | None:
        """The number of tokens beyond which encoding stops; None: never."""
        return self.tokens if self.counted is None else self.counted

    def check_characters(self, characters: int, longest_token: int) -> None:
        """Raise TextTooLong if a text of `characters` characters certainly has too many tokens."""
        least = characters // longest_token
        if self.tokens is not None and least > self.tokens:
            raise TextTooLong(least)

    def check_count(self, tokens: int) -> None:
        """Call `check`, and raise TextTooLong if the `tokens` so far exceed the limit."""
        self.check()
        if self.stop_after is not None and tokens > self.stop_after:
            raise TextTooLong(tokens)


NO_LIMIT = TextLimit()


class PieceEncoder(Protocol):
    """A tokenizer for pieces."""

    @property
    def longest_token(self) -> int:
        """Upper limit of the characters in one token."""
        ...

    @property
    def splits_at_words(self) -> bool:
        """Whether the ids of a text are those of its pieces; see `splits_exactly`."""
        ...

    def encode_piece(self, text: str, *, at_start: bool) -> Sequence[int]:
        """Return the ids of a text of any length."""
        ...

    def continue_piece(self, text: str) -> Sequence[int] | None:
        """Return the ids of a text that follows another piece, or None if the vocabulary cannot express it."""
        ...


def encode_long(encoder: PieceEncoder, text: str, *, at_start: bool, limit: TextLimit = NO_LIMIT) -> Sequence[int]:
    """Return the ids of `text`. Raises TextTooLong, and what `limit.check` raises."""
    ids = array("I")
    for piece in _pieces(encoder, text):
        if limit.stop_after is not None and len(piece) > 2 * PIECE:
            _estimate(encoder, piece, len(ids), limit)
        found = encoder.continue_piece(piece) if ids else encoder.encode_piece(piece, at_start=at_start)
        if found is None:
            return encoder.encode_piece(text, at_start=at_start)
        ids.extend(found)
        limit.check_count(len(ids))
    return ids


def encode_prefix(encoder: PieceEncoder, text: str, enough: int, check: Callable[[], None]) -> Sequence[int]:
    """Return the first `enough` ids of `text`, or more. Raises what `check` raises."""
    ids = array("I")
    for piece in _pieces(encoder, text):
        check()
        part = piece[: enough * encoder.longest_token + PIECE]
        found = encoder.continue_piece(part) if ids else encoder.encode_piece(part, at_start=True)
        # a piece of white space may have no tokens
        if found is None or (len(part) < len(piece) and len(ids) + len(found) < enough):
            return encoder.encode_piece(text, at_start=True)
        ids.extend(found)
        if len(ids) >= enough:
            break
    return ids


def splits_exactly(texts: Iterable[str], encoder: PieceEncoder) -> bool:
    """Whether no token in `texts` crosses a cut.

    Also tries the encoder, since a file may add a prefix to every text.
    """
    if any(map(_REACHES_ACROSS.search, texts)):
        return False
    whole = encoder.encode_piece("".join(_SAMPLE), at_start=False)
    parts = [encoder.encode_piece(_SAMPLE[0], at_start=False), *map(encoder.continue_piece, _SAMPLE[1:])]
    return [*whole] == [id_ for part in parts for id_ in part or (-1,)]


def _pieces(encoder: PieceEncoder, text: str) -> Iterator[str]:
    """Yield pieces of at least PIECE characters. The last piece may be shorter.

    If `text` cannot be split exactly, all of it is one piece.
    """
    start = 0
    if len(text) > PIECE and encoder.splits_at_words:
        while (word := _WORD.search(text, start + PIECE)) is not None:
            yield text[start : word.start()]
            start = word.start()
    yield text[start:]


def _estimate(encoder: PieceEncoder, text: str, before: int, limit: TextLimit) -> None:
    """Raise TextTooLong if the parts of a stretch certainly have too many tokens together.

    A cut at any position changes only the tokens next to the cut.
    """
    least = before
    for start in range(0, len(text), PIECE):
        limit.check_count(least)
        part = encoder.encode_piece(text[start : start + PIECE], at_start=False)
        least += max(0, len(part) - encoder.longest_token)
    limit.check_count(least)
