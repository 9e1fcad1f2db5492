"""Reasoning ends at its token budget, and the answer after it is unconstrained."""

import asyncio
import copy
import random
from collections.abc import Sequence

import numpy as np
import pytest

from app.generation.grammars import GrammarCompiler, GrammarSource
from app.generation.thinking_budget import ReasoningMarks, ThinkingBudget
from app.text.tokenizer import Tokenizer
from engine.grammar import Constraint, Grammar, Words


def budget(
    tokenizer: Tokenizer, tokens: int, *, thinks: bool, end: str = "</think>", reply: Grammar | None = None
) -> Constraint:
    marks = ReasoningMarks.of(tokenizer, ["<think>", "<reason>"], [end, "</reason>"])
    return ThinkingBudget(tokenizer, marks, tokens, reply, thinks=thinks).start(jumps=False)


def allowed(constraint: Constraint, tokenizer: Tokenizer) -> Sequence[int] | None:
    """Return the token ids that the grammar allows, or None if it allows all."""
    words: Words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    if not constraint.fill(words):
        assert not words.any()
        return None
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def generate(constraint: Constraint, tokenizer: Tokenizer, wanted: Sequence[int]) -> list[int]:
    """Return the tokens of a simulated model, which generates `wanted` while no token is forced."""
    ids: list[int] = []
    left = list(wanted)
    while left:
        forced = allowed(constraint, tokenizer)
        assert forced is None or len(forced) == 1
        token_id = left.pop(0) if forced is None else forced[0]
        assert constraint.accept(token_id) == ()
        ids.append(token_id)
    assert not constraint.ended
    return ids


@pytest.mark.parametrize("end", ["</think>", "<|im_end|>", "\n[BEGIN FINAL RESPONSE]"])
def test_budget_counts_tokens_between_the_marks(tokenizer: Tokenizer, end: str) -> None:
    chance = random.Random(end)
    thought = tokenizer.encode(" ".join(chance.choice(("well", "perhaps", "so what", "1 + 1")) for _ in range(40)))
    begin, last = tokenizer.encode("<think>"), tokenizer.encode("The answer is two.")
    end_ids = [*tokenizer.encode(end, parse_special=True)]
    for tokens in (0, 1, 7, len(thought)):
        constraint = budget(tokenizer, tokens, thinks=True, end=end)
        assert generate(constraint, tokenizer, [*thought, *last]) == [
            *thought[:tokens], *end_ids, *thought[tokens:], *last
        ]  # fmt: skip
    constraint = budget(tokenizer, 3, thinks=False, end=end)
    words = [*tokenizer.encode("Well. "), *begin]
    assert generate(constraint, tokenizer, [*words, *thought])[: len(words) + 3 + len(end_ids)] == [
        *words, *thought[:3], *end_ids
    ]  # fmt: skip


def test_short_reasoning_is_unchanged(tokenizer: Tokenizer) -> None:
    for mark in ("</think>", "</reason>"):
        text = f"{'hm ' * 5}{mark}{'Two. ' * 50}"
        ids = tokenizer.encode(text)
        assert generate(budget(tokenizer, 20, thinks=True), tokenizer, ids) == [*ids]


def test_budget_limits_the_sum_of_all_reasoning(tokenizer: Tokenizer) -> None:
    thoughts = "hm</think>"
    ids = tokenizer.encode(f"{thoughts} So.<think>")
    constraint = budget(tokenizer, len(tokenizer.encode(thoughts)) + 2, thinks=True)
    more = tokenizer.encode("one two three four")
    assert generate(constraint, tokenizer, [*ids, *more]) == [
        *ids, *more[:2], *tokenizer.encode("</think>"), *more[2:]
    ]  # fmt: skip


def test_characters_are_never_split(tokenizer: Tokenizer) -> None:
    thought = tokenizer.encode("𓀀𓀁𓀂𓀃!")  # each character is several tokens
    assert len(thought) > 8
    for tokens in range(len(thought)):
        ids = generate(budget(tokenizer, tokens, thinks=True), tokenizer, thought)
        text = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert text.replace("</think>", "") == "𓀀𓀁𓀂𓀃!"
        assert "</think>" in text


@pytest.mark.parametrize("thought", ["", "<think>hm</think>"])
def test_marks_in_a_constrained_answer_are_text(tokenizer: Tokenizer, thought: str) -> None:
    source = GrammarSource("lark", 'start: (t | "") "<a>" /(.|\\n)*/\nt[lazy]: /<think>(.|\\n)*<\\/think>/')
    text = f"{thought}<a>Write <think> and what you think: one two three four five six seven eight nine ten."
    reply = asyncio.run(GrammarCompiler(copy.copy(tokenizer)).compile(source))
    constraint = budget(tokenizer, 9, thinks=False, reply=reply)
    for token_id in tokenizer.encode(text):
        assert token_id in (allowed(constraint, tokenizer) or [])
        constraint.accept(token_id)


def test_answer_follows_its_grammar_after_forced_end(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(copy.copy(tokenizer))
    source = GrammarSource("lark", 'start: t "42"\nt[lazy]: /(.|\\n)*<\\/think>/')
    reply = asyncio.run(compiler.compile(source))
    constraint = budget(tokenizer, 4, thinks=True, reply=reply)
    ids: list[int] = []
    chance = random.Random(4)
    while not constraint.ended:
        token_id = chance.choice(allowed(constraint, tokenizer) or [])
        ids += [token_id, *constraint.accept(token_id)]
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert text.endswith("</think>42")
    assert len(tokenizer.encode(text.removesuffix("</think>42"))) <= 16
