"""Sequence breakers: the tokens that end a repetition for the DRY penalty (see `engine.sampling.filters`)."""

from collections.abc import Sequence
from functools import lru_cache, partial

from app.process.work_pool import WorkPool
from app.text.tokenizer import Tokenizer

REMEMBERED = 16  # number of cached sets of texts; each set takes a pass over the vocabulary


class SequenceBreakers:
    """Finds sequence breakers in one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, work: WorkPool) -> None:
        """`work` runs the passes over the vocabulary."""
        self._work = work
        # not a method of this object: a cycle of references would keep the vocabulary of an unloaded model
        self._tokens = lru_cache(REMEMBERED)(partial(_look_up, tokenizer))

    async def tokens(self, texts: Sequence[str]) -> frozenset[int]:
        """Return all tokens that contain one of the texts.

        For a text that no token contains, the last token of its encoding is used.
        """
        return await self._work.run(lambda _: self._tokens(tuple(texts))) if texts else frozenset()


def _look_up(tokenizer: Tokenizer, texts: tuple[str, ...]) -> frozenset[int]:
    held = [tokenizer.token_bytes(token_id, show_control=True) for token_id in range(tokenizer.vocab_size)]
    return frozenset(token_id for text in texts for token_id in _breaking(tokenizer, text, held))


def _breaking(tokenizer: Tokenizer, text: str, held: Sequence[bytes]) -> list[int]:
    encoded = text.encode()
    found = [token_id for token_id, piece in enumerate(held) if encoded in piece]
    return found or tokenizer.encode(text, parse_special=True)[-1:]
