"""Thinking budget: limits the reasoning tokens of a reply, and then makes the model answer.

The budget wraps another grammar. It counts the tokens between the reasoning marks. When they are used up, it allows
only the end mark.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.text.tokenizer import Tokenizer
from engine.grammar import Constraint, Grammar, Words


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks around the reasoning of a model."""

    begin: Sequence[str]
    end: Sequence[str]
    end_ids: Sequence[int]  # token ids of the first end mark as they follow other text

    @classmethod
    def of(cls, tokenizer: Tokenizer, begin: Sequence[str], end: Sequence[str]) -> "ReasoningMarks":
        end_ids: list[int] = []
        for part in tokenizer.split(end[0]):
            if isinstance(part, int):
                end_ids.append(part)
            else:
                continued = tokenizer.encode_continuation(part)
                end_ids += tokenizer.encode_plain(part, at_start=False) if continued is None else continued
        return cls(begin, end, end_ids)


class ThinkingBudget:
    """A grammar with a limit of reasoning tokens. Implements `engine.grammar.Grammar`. Immutable."""

    def __init__(
        self, tokenizer: Tokenizer, marks: ReasoningMarks, tokens: int, reply: Grammar | None, *, thinks: bool
    ) -> None:
        """Create a grammar with a budget.

        `tokens` is the budget. `reply` is the grammar of the whole reply, including the reasoning. `thinks` is true if
        the prompt ends with a start mark.
        """
        self._tokenizer = tokenizer
        self._marks = marks
        self._tokens = tokens
        self._reply = reply
        self._thinks = thinks

    def start(self, *, jumps: bool) -> Constraint:
        reply = None if self._reply is None else self._reply.start(jumps=jumps)
        return _BudgetConstraint(self._tokenizer, self._marks, self._tokens, reply, thinks=self._thinks)


class _BudgetConstraint:
    """See `engine.grammar.Constraint`."""

    def __init__(
        self, tokenizer: Tokenizer, marks: ReasoningMarks, tokens: int, reply: Constraint | None, *, thinks: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._left = tokens
        self._reply = reply
        self._thinks = thinks
        self._forced = 0  # number of tokens of the end mark that were forced
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""  # end of the reply so far, which may contain the start of a mark
        self._kept = max(map(len, (*marks.begin, *marks.end))) - 1
        self._answers = False  # whether the reasoning is over; with a grammar, later marks are text

    @property
    def ended(self) -> bool:
        return self._reply is not None and self._reply.ended

    def prefetch_mask(self) -> None:
        if self._reply is not None and not self._must_end:
            self._reply.prefetch_mask()

    def fill(self, words: Words) -> bool:
        if self._must_end:
            token_id = self._marks.end_ids[self._forced]
            words.view(np.uint32)[token_id // 32] = 1 << token_id % 32
            return True
        return self._reply is not None and self._reply.fill(words)

    def prefetch_accept(self, token_id: int) -> None:
        if self._reply is not None:
            self._reply.prefetch_accept(token_id)

    def accept(self, token_id: int) -> Sequence[int]:
        followed = () if self._reply is None else self._reply.accept(token_id)
        for one in (token_id, *followed):
            self._advance(one)
        return followed

    @property
    def _must_end(self) -> bool:
        """Whether the reasoning must end now. It never ends within a character."""
        used_up = self._thinks and self._left <= 0 and self._forced < len(self._marks.end_ids)
        return used_up and (self._forced > 0 or not self._decoder.getstate()[0])

    def _advance(self, token_id: int) -> None:
        self._forced += self._must_end
        self._left -= self._thinks
        self._text += self._decoder.decode(self._tokenizer.token_bytes(token_id, show_control=True))
        if self._reply is not None and not self._thinks:
            self._answers = self._answers or not self._may_begin_thoughts()
        while not self._answers and (end := self._after_mark()) is not None:
            self._text = self._text[end:]
            self._thinks = not self._thinks
            self._answers = self._reply is not None and not self._thinks
        self._text = self._text[max(0, len(self._text) - self._kept) :]

    def _may_begin_thoughts(self) -> bool:
        stripped = self._text.lstrip()
        return any(mark.startswith(stripped) or stripped.startswith(mark) for mark in self._marks.begin)

    def _after_mark(self) -> int | None:
        """Return the position after the first mark that starts or ends the reasoning."""
        marks = self._marks.end if self._thinks else self._marks.begin
        found = ((self._text.find(mark), len(mark)) for mark in marks)
        return min((start + length for start, length in found if start >= 0), default=None)
