"""TokenIndex: find the earlier positions of a sequence at which the last few tokens occurred before.

The matched suffix is extended backwards, and the tokens after the longest match are the draft (prompt lookup decoding;
the draft length follows the match length, as in arXiv:2411.04975).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KEY = 3  # tokens of a suffix that must match
MAX_CANDIDATES = 8  # positions compared per lookup, latest first
MAX_MATCH = 32  # longest match that is counted
END = -1  # ends a text of the sequence; no token has this id, so no match and no draft spans two texts


@dataclass(frozen=True, slots=True)
class Match:
    """The position after an earlier occurrence of a suffix, and the number of tokens that match before it."""

    position: int
    length: int


class TokenIndex:
    """A growing sequence of tokens, with the positions after each run of KEY tokens.

    `extend` takes about 0.3 us per token; `match` takes a few microseconds.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # KEY tokens -> the latest position after them
        self._earlier: list[int] = []  # position -> the next earlier position after the same KEY tokens, or -1

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens. The run that ends the sequence is indexed once the token after it is known."""
        ids, latest, earlier = self.token_ids, self._latest, self._earlier
        for token_id in token_ids:
            position = len(ids)
            before = -1
            if position >= KEY and token_id != END:  # nothing follows the last tokens of a text
                key = tuple(ids[-KEY:])
                before = latest.get(key, -1)
                latest[key] = position
            earlier.append(before)
            ids.append(token_id)

    def match(self, suffix: Sequence[int]) -> Match | None:
        """Return the longest match of the end of `suffix`, the latest among equals; None if KEY tokens do not match.

        The last MAX_MATCH tokens of `suffix` are enough.
        """
        if len(suffix) < KEY or END in suffix[-KEY:]:
            return None
        best, position = None, self._latest.get(tuple(suffix[-KEY:]), -1)
        for _ in range(MAX_CANDIDATES):
            if position < 0:
                break
            length = self._match_length(position, suffix)
            if best is None or length > best.length:
                best = Match(position, length)
            position = self._earlier[position]
        return best

    def _match_length(self, position: int, suffix: Sequence[int]) -> int:
        length, most = KEY, min(position, len(suffix), MAX_MATCH)
        while length < most and suffix[-1 - length] == self.token_ids[position - 1 - length] != END:
            length += 1
        return length

    def tokens_after(self, match: Match, count: int, *, repeats: bool) -> tuple[int, ...]:
        """Return at most `count` tokens that follow a match, up to the end of its text.

        If `repeats` is set, the suffix is the end of this sequence: the draft continues into itself, as the repetition
        would.
        """
        draft: list[int] = []
        for position in range(match.position, match.position + count):
            beyond = position - len(self.token_ids)
            if beyond >= 0 and not repeats:
                break
            token_id = self.token_ids[position] if beyond < 0 else draft[beyond]
            if token_id == END:
                break
            draft.append(token_id)
        return tuple(draft)
