"""Thinking budget: limits the reasoning tokens of a reply, and then makes the model answer.

The budget wraps another grammar. It counts the tokens between the reasoning marks. When they are used up, it allows
only the end mark.
"""

import codecs
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

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
        self._reply = reply
        # the reasoning so far, then after each drafted run
        self._reasoning = [_Reasoning(tokenizer, marks, tokens, thinks=thinks, has_grammar=reply is not None)]

    @property
    def ended(self) -> bool:
        return self._reply is not None and self._reply.ended

    def prefetch_mask(self, runs: int = 0) -> None:
        if self._reply is not None and self._reasoning[runs].end_id is None:
            self._reply.prefetch_mask(runs)

    def fill(self, words: Words, runs: int = 0) -> bool:
        end_id = self._reasoning[runs].end_id
        if end_id is not None:
            words.view(np.uint32)[end_id // 32] = 1 << end_id % 32
            return True
        return self._reply is not None and self._reply.fill(words, runs)

    def prefetch_look_ahead(self, drafted: Sequence[int], seconds: float) -> None:
        if self._reply is not None:
            self._reply.prefetch_look_ahead(drafted, seconds)

    def look_ahead(self, drafted: Sequence[int], seconds: float) -> Sequence[int]:
        del self._reasoning[1:]
        runs: list[int] = []
        for length in (1,) * len(drafted) if self._reply is None else self._reply.look_ahead(drafted, seconds):
            first, *forced = drafted[(start := sum(runs)) : start + length]
            if self._reasoning[-1].end_id not in (None, first):
                break
            self._reasoning.append(self._reasoning[-1].copy())
            self._reasoning[-1].advance(first, *forced)
            runs.append(length)
        return runs

    def prefetch_accept(self, token_ids: Sequence[int]) -> None:
        if self._reply is not None:
            self._reply.prefetch_accept(token_ids)

    def accept(self, token_id: int) -> Sequence[int]:
        del self._reasoning[1:]
        followed = () if self._reply is None else self._reply.accept(token_id)
        self._reasoning[0].advance(token_id, *followed)
        return followed


class _Reasoning:
    """The reasoning of a reply up to one of its tokens, and what is left of the budget."""

    def __init__(
        self, tokenizer: Tokenizer, marks: ReasoningMarks, tokens: int, *, thinks: bool, has_grammar: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._left = tokens
        self._thinks = thinks
        self._has_grammar = has_grammar
        self._forced = 0  # number of tokens of the end mark that were forced
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""  # end of the reply so far, which may contain the start of a mark
        self._kept = max(map(len, (*marks.begin, *marks.end))) - 1
        self._answers = False  # whether the reasoning is over; with a grammar, later marks are text

    def copy(self) -> Self:
        other = copy.copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    @property
    def end_id(self) -> int | None:
        """The next token of the end mark if the reasoning must end now, which is never within a character."""
        used_up = self._thinks and self._left <= 0 and self._forced < len(self._marks.end_ids)
        must_end = used_up and (self._forced > 0 or not self._decoder.getstate()[0])
        return self._marks.end_ids[self._forced] if must_end else None

    def advance(self, *token_ids: int) -> None:
        """Append tokens to the reply."""
        for token_id in token_ids:
            self._forced += self.end_id is not None
            self._left -= self._thinks
            self._text += self._decoder.decode(self._tokenizer.token_bytes(token_id, show_control=True))
            if self._has_grammar and not self._thinks:
                self._answers = self._answers or not self._may_begin_thoughts()
            while not self._answers and (end := self._after_mark()) is not None:
                self._text = self._text[end:]
                self._thinks = not self._thinks
                self._answers = self._has_grammar and not self._thinks
            self._text = self._text[max(0, len(self._text) - self._kept) :]

    def _may_begin_thoughts(self) -> bool:
        stripped = self._text.lstrip()
        return any(mark.startswith(stripped) or stripped.startswith(mark) for mark in self._marks.begin)

    def _after_mark(self) -> int | None:
        """Return the position after the first mark that starts or ends the reasoning."""
        marks = self._marks.end if self._thinks else self._marks.begin
        found = ((self._text.find(mark), len(mark)) for mark in marks)
        return min((start + length for start, length in found if start >= 0), default=None)
