"""Sequence breakers in the vocabulary of a real model."""

import asyncio

from app.process.work_pool import WorkPool
from app.text.sequence_breakers import SequenceBreakers
from app.text.tokenizer import Tokenizer


def test_tokens_containing_a_text_are_breakers(tokenizer: Tokenizer) -> None:
    breakers = SequenceBreakers(tokenizer, WorkPool("encoding", 1))
    found = asyncio.run(breakers.tokens(["\n", ":"]))
    texts = {token_id: tokenizer.token_bytes(token_id, show_control=True) for token_id in range(tokenizer.vocab_size)}
    assert found == {token_id for token_id, text in texts.items() if b"\n" in text or b":" in text}
    assert len(found) > 10
    assert asyncio.run(breakers.tokens(["<|im_end|>"])) == {tokenizer.control_tokens["<|im_end|>"]}
    assert asyncio.run(breakers.tokens([])) == frozenset()


def test_last_token_of_a_text_that_no_token_contains_is_a_breaker(tokenizer: Tokenizer) -> None:
    text = "This is in no vocabulary!"
    breakers = SequenceBreakers(tokenizer, WorkPool("encoding", 1))
    assert asyncio.run(breakers.tokens([text])) == {tokenizer.encode(text)[-1]}
