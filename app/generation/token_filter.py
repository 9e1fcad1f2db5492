"""Token filters: a set of allowed token ids, and token sequences that a reply must not contain.

A filter wraps another grammar, or none. If both together allow no token, the grammar decides, because clients rely on
replies that follow their grammar.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from app.text.tokenizer import Tokenizer
from engine.grammar import Constraint, Grammar, Words


@dataclass(frozen=True, slots=True)
class TokenFilter:
    """A grammar with a token filter. Implements `engine.grammar.Grammar`. Immutable."""

    allowed: Collection[int] | None = None  # token ids; None: all
    forbidden: Sequence[Sequence[int]] = ()  # sequences of token ids, none of them empty
    reply: Grammar | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, allowed: Collection[int] | None, words: Sequence[str]) -> "TokenFilter | None":
        """Create a filter that forbids each word after other text, with and without a space before it.

        Returns None if there is nothing to filter.
        """
        bare = (word.lstrip() or word for word in words)
        texts = (text for word in bare for text in (word, f" {word}"))
        ids = (tokenizer.encode_continuation(text) or tokenizer.encode(text) for text in texts)
        forbidden = sorted({tuple(sequence) for sequence in ids})
        return cls(allowed, forbidden) if allowed is not None or forbidden else None

    def start(self, *, jumps: bool) -> Constraint:
        # without jumps, because the filter might exclude forced tokens
        return _FilterConstraint(
            self.allowed, self.forbidden, None if self.reply is None else self.reply.start(jumps=False)
        )


class _FilterConstraint:
    """See `engine.grammar.Constraint`."""

    def __init__(
        self, allowed: Collection[int] | None, forbidden: Sequence[Sequence[int]], reply: Constraint | None
    ) -> None:
        self._allowed = allowed
        self._allowed_words: Words | None = None  # `allowed` as bits, once the size of the vocabulary is known
        self._reply = reply
        # keys: forbidden sequences without their last token; values: the possible last tokens
        self._last: dict[tuple[int, ...], list[int]] = {}
        for *prefix, last in forbidden:
            self._last.setdefault(tuple(prefix), []).append(last)
        self._lengths = sorted({len(prefix) for prefix in self._last})
        # The last tokens, which may be the start of a forbidden sequence. The entries after the first are the last
        # tokens after each drafted run.
        self._recent: list[Sequence[int]] = [()]

    @property
    def ended(self) -> bool:
        return self._reply is not None and self._reply.ended

    def prefetch_mask(self, runs: int = 0) -> None:
        if self._reply is not None:
            self._reply.prefetch_mask(runs)

    def fill(self, words: Words, runs: int = 0) -> bool:
        constrained = self._reply is not None and self._reply.fill(words, runs)
        last = self._completing(self._recent[runs])
        if self._allowed is None and not last:
            return constrained
        held = words.copy() if constrained else np.full_like(words, -1)
        allowed = self._within_allowed(held)
        choices = (allowed & ~_bits(last, len(words)), allowed, held)
        words[:] = next((kept for kept in choices if kept.any()), held)
        return True

    def prefetch_look_ahead(self, drafted: Sequence[int], seconds: float) -> None:
        if self._reply is not None:
            self._reply.prefetch_look_ahead(drafted, seconds)

    def look_ahead(self, drafted: Sequence[int], seconds: float) -> Sequence[int]:
        del self._recent[1:]
        # without jumps, each token is a run
        count = len(drafted) if self._reply is None else len(self._reply.look_ahead(drafted, seconds))
        for token_id in drafted[:count]:
            is_allowed = self._allowed is None or token_id in self._allowed
            if not is_allowed or token_id in self._completing(self._recent[-1]):
                break
            self._recent.append(self._after(self._recent[-1], token_id))
        return (1,) * (len(self._recent) - 1)

    def prefetch_accept(self, token_ids: Sequence[int]) -> None:
        if self._reply is not None:
            self._reply.prefetch_accept(token_ids)

    def accept(self, token_id: int) -> Sequence[int]:
        self._recent = [self._after(self._recent[0], token_id)]
        return () if self._reply is None else self._reply.accept(token_id)

    def _after(self, recent: Sequence[int], token_id: int) -> Sequence[int]:
        """Return the last tokens after another one."""
        longest = max(self._lengths, default=0)
        return (*recent, token_id)[-longest:] if longest else ()

    def _completing(self, recent: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a forbidden sequence after the last tokens `recent`."""
        count = len(recent)
        prefix = (tuple(recent[count - length :]) for length in self._lengths if length <= count)
        return [last for one in prefix for last in self._last.get(one, ())]

    def _within_allowed(self, words: Words) -> Words:
        if self._allowed is None:
            return words
        if self._allowed_words is None:
            self._allowed_words = _bits(self._allowed, len(words))
        return words & self._allowed_words


def _bits(ids: Collection[int], count: int) -> Words:
    """Return a bit mask of `count` 32-bit words in which the bits of `ids` are set."""
    words, given = np.zeros(count, np.uint32), np.fromiter(ids, np.int64, len(ids))
    np.bitwise_or.at(words, given // 32, np.left_shift(1, given % 32).astype(np.uint32))
    return words.view(np.int32)
