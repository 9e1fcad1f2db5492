"""Token filters: allowed token ids, forbidden sequences, and both combined with a grammar."""

import asyncio
import copy
from collections.abc import Sequence

import numpy as np

from app.generation.grammars import GrammarCompiler, GrammarSource
from app.generation.token_filter import TokenFilter
from app.text.tokenizer import Tokenizer
from engine.grammar import Constraint, Words

SIZE = 100


def allowed(constraint: Constraint, size: int = SIZE) -> Sequence[int] | None:
    """Return the token ids that the grammar allows, or None if it allows all."""
    words: Words = np.zeros(-(-size // 32), np.int32)
    if not constraint.fill(words):
        return None
    ids: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), count=size, bitorder="little")).tolist()
    return ids


def test_only_allowed_tokens_are_generated() -> None:
    constraint = TokenFilter(frozenset({0, 31, 64, 99})).start(jumps=True)
    assert allowed(constraint) == [0, 31, 64, 99]
    assert constraint.accept(31) == ()
    assert allowed(constraint) == [0, 31, 64, 99]
    assert not constraint.ended


def test_forbidden_sequence_is_never_completed() -> None:
    constraint = TokenFilter(forbidden=[(5, 6, 7), (9,), (6, 8)]).start(jumps=True)
    for token_id, missing in ((5, {9}), (6, {9, 7, 8}), (5, {9}), (5, {9}), (6, {9, 7, 8}), (1, {9})):
        constraint.accept(token_id)
        assert set(range(SIZE)) - set(allowed(constraint) or ()) == missing


def test_no_mask_before_a_forbidden_sequence_starts() -> None:
    constraint = TokenFilter(forbidden=[(5, 6)]).start(jumps=True)
    assert allowed(constraint) is None
    constraint.accept(5)
    assert allowed(constraint) == [one for one in range(SIZE) if one != 6]


def test_allowed_tokens_override_forbidden_sequences() -> None:
    assert allowed(TokenFilter(frozenset({4}), [(4,)]).start(jumps=True)) == [4]


def test_filter_and_grammar_are_intersected(tokenizer: Tokenizer) -> None:
    compiled = asyncio.run(GrammarCompiler(copy.copy(tokenizer)).compile(GrammarSource("regex", "[0-9]")))
    two, size = tokenizer.encode("2")[0], tokenizer.vocab_size
    both = TokenFilter(frozenset({two, 5}), reply=compiled).start(jumps=True)
    assert allowed(both, size) == [two]
    both.accept(two)
    assert both.ended
    neither = TokenFilter(frozenset({5}), reply=compiled).start(jumps=True)
    assert allowed(neither, size) == allowed(compiled.start(jumps=False), size)


def test_words_are_forbidden_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    found = TokenFilter.of(tokenizer, None, [" Paris", "in the city"])
    assert found is not None
    texts = {tokenizer.decode(sequence, continues_text=True) for sequence in found.forbidden}
    assert texts == {"Paris", " Paris", "in the city", " in the city"}
    assert TokenFilter.of(tokenizer, None, []) is None
