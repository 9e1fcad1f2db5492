"""Why a part of a prompt was computed: by what an earlier exchange and the prompt have in common, and what was found.

Looks at ids; text is made of few of them, for people to read. Refuses to know where the ids were found.
"""

import codecs
from dataclasses import dataclass

from app.generation.cache_report import Miss, MissReason
from app.generation.recent_prompts import ID_BYTES, Earlier, unpacked
from app.text.tokenizer import Tokenizer
from engine.config import BLOCK_SIZE
from engine.token_sources import TokenSources

_TOLD = 8 * ID_BYTES  # of the text on either side of where two prompts part
_SAME = 8 * ID_BYTES  # that show a text to go on as the other does further on
_REMOVED_HEAD, _REMOVED_TAIL = 40 * ID_BYTES, 12 * ID_BYTES  # of a text that was taken out

# Two texts go on alike where they share that much behind the difference: more than the markup between two turns.
_ALIKE = 12 * ID_BYTES
_ALIKE_STRIDE = 4 * ID_BYTES
_ALIKE_WITHIN = 4096 * ID_BYTES

_REPLACEMENT = "\ufffd"


def find_miss(prompt: bytes, earlier: Earlier | None, found: TokenSources, tokenizer: Tokenizer) -> Miss | None:
    """Of a packed prompt; None where nothing but its new end was computed."""
    if found.skipped:
        return Miss(MissReason.RECOMPUTED, found.cached)
    tokens, known = len(prompt) // ID_BYTES, 0
    if earlier is not None:
        exchange, common = earlier.exchange, earlier.common
        known = min(common, exchange.computed)
        # The last token of a prompt is always computed.
        if found.cached < min(known, tokens - 1) // BLOCK_SIZE * BLOCK_SIZE:
            return Miss(MissReason.EVICTED, found.cached)
        if common < min(tokens, exchange.tokens):
            fork = _Fork(prompt, earlier, tokenizer)
            if fork.is_of_one_text:
                return fork.miss()
        elif known >= common - 1:  # nor does the last token of a reply have keys and values
            return None
    is_new = 2 * max(known, found.cached) < tokens
    return Miss(MissReason.FIRST_TIME, known) if is_new else None


@dataclass(frozen=True)
class _Fork:
    """Where a prompt and an earlier exchange part, before the end of either."""

    prompt: bytes
    earlier: Earlier
    tokenizer: Tokenizer

    @property
    def _at(self) -> int:
        return self.earlier.common * ID_BYTES

    @property
    def _is_in_reply(self) -> bool:
        return self.earlier.common >= self.earlier.exchange.prompt_tokens

    @property
    def is_of_one_text(self) -> bool:
        """Whether the prompt is another state of the earlier conversation, and no other one that begins like it."""
        return self._is_in_reply or _are_alike(self.prompt[self._at :], self.earlier.exchange.ids[self._at :])

    def miss(self) -> Miss:
        at, prompt, old = self._at, self.prompt, self.earlier.exchange.ids
        before, was, now = self._texts(prompt[max(0, at - _TOLD) : at], old[at : at + _TOLD], prompt[at : at + _TOLD])
        removed = self._removed()
        reason = MissReason.REMOVED if removed else MissReason.DIVERGED
        return Miss(reason, self.earlier.common, before, was, now, removed)

    def _removed(self) -> str:
        """The text in front of what the prompt goes on with, where the earlier one has that further on, else "".

        The first token may be another than before: what stands in front of it decides how a word is encoded.
        """
        at, old = self._at, self.earlier.exchange.ids
        for same in (0, ID_BYTES):
            first, rest = self._bytes(self.prompt[at : at + same]), self.prompt[at + same :]
            end = self._goes_on_at(rest)
            if end < 0 or (same and not first):
                continue
            if self._bytes(old[max(at, end - _REMOVED_TAIL) : end]).endswith(first):
                return self._shortened(old[at:end], first)
        return ""

    def _goes_on_at(self, rest: bytes) -> int:
        """Where, behind the fork, the earlier exchange goes on as `rest` begins, in bytes; -1 for nowhere. At its end,
        fewer tokens will do: whoever has its reply goes on from it."""
        old, start = self.earlier.exchange.ids, self._at + ID_BYTES
        place = _find(old, rest[:_SAME], start) if len(rest) >= _SAME else -1
        return _find_end(old, rest, start) if place < 0 and self._is_in_reply else place

    def _shortened(self, ids: bytes, end: bytes) -> str:
        """A text without its end."""
        if len(ids) <= _REMOVED_HEAD + _REMOVED_TAIL:
            return _decoded(self._bytes(ids).removesuffix(end))
        head, tail = self._bytes(ids[:_REMOVED_HEAD]), self._bytes(ids[-_REMOVED_TAIL:])
        return f"{_decoded(head)} … {_decoded(tail.removesuffix(end))}"

    def _texts(self, before: bytes, *behind: bytes) -> tuple[str, ...]:
        """The text in front of a place, and those behind it; a character that is cut in two there is behind it."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = decoder.decode(self._bytes(before)).strip(_REPLACEMENT)
        begun, _ = decoder.getstate()
        return text, *(_decoded(begun + self._bytes(ids)) for ids in behind)

    def _bytes(self, ids: bytes) -> bytes:
        return b"".join(self.tokenizer.token_bytes(token_id, show_control=True) for token_id in unpacked(ids))


def _decoded(encoded: bytes) -> str:
    """As text, without the characters that are cut in two at its ends."""
    return encoded.decode(errors="replace").strip(_REPLACEMENT)


def _find(ids: bytes, wanted: bytes, start: int) -> int:
    """Where some ids stand among others, in bytes; -1 where they do not."""
    place = ids.find(wanted, start)
    while place % ID_BYTES and place >= 0:
        place = ids.find(wanted, place + 1)
    return place


def _find_end(ids: bytes, rest: bytes, start: int) -> int:
    """Where the last few ids begin that `rest` begins with, in bytes; -1 where it begins with none of them."""
    for length in range(min(len(rest), _SAME), 0, -ID_BYTES):
        if len(ids) - length >= start and ids.endswith(rest[:length]):
            return len(ids) - length
    return -1


def _are_alike(one: bytes, other: bytes) -> bool:
    one, other = one[:_ALIKE_WITHIN], other[:_ALIKE_WITHIN]
    pieces = {one[at : at + _ALIKE] for at in range(0, len(one) - _ALIKE + 1, _ALIKE_STRIDE)}
    return any(other[at : at + _ALIKE] in pieces for at in range(0, len(other) - _ALIKE + 1, ID_BYTES))
