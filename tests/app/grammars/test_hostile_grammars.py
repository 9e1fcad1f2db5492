"""Expensive grammars are compiled or refused in time, and affect no other grammar."""

import asyncio
import random
import time

import numpy as np
import pytest

from app.errors import InvalidGrammar
from app.generation.grammars import GrammarCompiler
from app.grammars.frames import GrammarText
from app.grammars.host import GrammarFailed
from app.text.tokenizer import Tokenizer
from engine.grammar import Grammar
from tests.app.grammars.hostile_grammars import hostile

MOST_SECONDS = 60.0  # time limit of each case


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def follow(grammar: Grammar, tokenizer: Tokenizer, chance: random.Random) -> None:
    """Generate random tokens that the grammar allows."""
    constraint = grammar.start(jumps=True)
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    for _ in range(12):
        if constraint.ended or not constraint.fill(words):
            return
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        assert len(allowed)
        constraint.accept(int(chance.choice(allowed.tolist())))


@pytest.mark.share(24)
@pytest.mark.parametrize("seed", range(1000))
def test_hostile_grammar_is_compiled_or_refused_in_time(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(seed)
    asked = hostile(chance)
    began = time.monotonic()
    try:
        grammar = asyncio.run(compiler.compile(GrammarText(asked.kind, asked.text)))
        follow(grammar, tokenizer, chance)
    except GrammarFailed as error:
        assert "It is too complex" in error.message or "No text matches" in error.message
    except InvalidGrammar as error:
        assert error.message != "It cannot be compiled."
    assert time.monotonic() - began < MOST_SECONDS
    assert "Traceback" not in caplog.text
