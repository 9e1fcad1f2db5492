"""Tokens that break sequences, over the vocabulary of a real model."""

import asyncio

from app.process.work_pool import WorkPool
from app.text.sequence_breakers import SequenceBreakers
from app.text.tokenizer import Tokenizer


def test_each_token_that_holds_a_text_breaks_sequences(tokenizer: Tokenizer) -> None:
    breakers = SequenceBreakers(tokenizer, WorkPool("encoding", 1))
    found = asyncio.run(breakers.tokens(["\n", ":"]))
    texts = {token_id: tokenizer.token_bytes(token_id, show_control=True) for token_id in range(tokenizer.vocab_size)}
    assert found == {token_id for token_id, text in texts.items() if b"\n" in text or b":" in text}
    assert len(found) > 10
    assert asyncio.run(breakers.tokens(["<|im_end|>"])) == {tokenizer.control_tokens["<|im_end|>"]}
    assert asyncio.run(breakers.tokens([])) == frozenset()


def test_of_a_text_that_no_token_holds_it_is_the_last_of_its_own(tokenizer: Tokenizer) -> None:
    text = "This is in no vocabulary!"
    breakers = SequenceBreakers(tokenizer, WorkPool("encoding", 1))
    assert asyncio.run(breakers.tokens([text])) == {tokenizer.encode(text)[-1]}
