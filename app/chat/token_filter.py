"""Token filters: token ids that a reply may be made of, and token sequences that it must not contain.

A filter is a grammar around another one, or around none. Where the two together leave no token, the other one decides:
a reply that keeps to its grammar is what its client can read.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from app.text.tokenizer import Tokenizer
from engine.constraint import Constraint, Grammar, Words


@dataclass(frozen=True, slots=True)
class TokenFilter:
    """See `engine.constraint.Grammar`. Immutable."""

    allowed: Collection[int] | None = None  # token ids; None: all
    forbidden: Sequence[Sequence[int]] = ()  # sequences of token ids, none of them empty
    reply: Grammar | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, allowed: Collection[int] | None, words: Sequence[str]) -> "TokenFilter | None":
        """Forbid each word as it is written behind other text, with and without a space. None: nothing is filtered."""
        bare = (word.lstrip() or word for word in words)
        texts = (text for word in bare for text in (word, f" {word}"))
        ids = (tokenizer.encode_continuation(text) or tokenizer.encode(text) for text in texts)
        forbidden = sorted({tuple(sequence) for sequence in ids})
        return cls(allowed, forbidden) if allowed is not None or forbidden else None

    def begin(self, *, jumps: bool) -> Constraint:
        # A jump could take tokens that are filtered out.
        return _Reply(self.allowed, self.forbidden, None if self.reply is None else self.reply.begin(jumps=False))


class _Reply:
    """See `engine.constraint.Constraint`."""

    def __init__(
        self, allowed: Collection[int] | None, forbidden: Sequence[Sequence[int]], reply: Constraint | None
    ) -> None:
        self._allowed = allowed
        self._forbidden = forbidden
        self._reply = reply
        self._longest = max(map(len, forbidden), default=1) - 1
        self._said: list[int] = []  # the last tokens, in which a forbidden sequence may have begun

    @property
    def ended(self) -> bool:
        return self._reply is not None and self._reply.ended

    def fill(self, words: Words) -> bool:
        constrained = self._reply is not None and self._reply.fill(words)
        last = [sequence[-1] for sequence in self._forbidden if self._ends_with(sequence[:-1])]
        if self._allowed is None and not last:
            return constrained
        held = words.copy() if constrained else np.full_like(words, -1)
        kept = held if self._allowed is None else held & _bits(self._allowed, len(words))
        kept &= ~_bits(last, len(words))
        words[:] = kept if kept.any() else held
        return True

    def accept(self, token_id: int) -> Sequence[int]:
        self._said = [*self._said, token_id][-self._longest :] if self._longest else []
        return () if self._reply is None else self._reply.accept(token_id)

    def _ends_with(self, begun: Sequence[int]) -> bool:
        return len(self._said) >= len(begun) and self._said[len(self._said) - len(begun) :] == list(begun)


def _bits(ids: Iterable[int], count: int) -> Words:
    """Words with the bits of some tokens set."""
    words = np.zeros(count, np.uint32)
    for token_id in ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.view(np.int32)
