"""The embedding service: from texts to vectors, or from pairs of texts to how well the second suits the first, over
one loaded model, for any number of requests at a time.

Requests share the model's threads fairly: each has no more texts under way than there are threads, so that one of a
thousand texts lets another one's single text in between. Knows nothing of wire formats.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.nn import functional as F

from engine.encoder import Embedder
from engine.errors import EngineError


class InputTokenizer(Protocol):
    """A vocabulary as an embedding model reads it."""

    vocab_size: int
    markers_before: int  # a text: how many of its ids are there

    def encode(self, text: str, most: int | None = None) -> tuple[int, ...]:
        """The ids of `text` with the model's markers; where `most` is given, the text is cut to fit into so many."""
        ...


class TextPair(NamedTuple):
    """Two texts as a cross-encoder reads them."""

    ids: tuple[int, ...]
    second: int  # where the second text begins


class EmbeddingService:
    """Answers texts with vectors by one model; or pairs of texts with numbers, where that is a cross-encoder."""

    def __init__(self, name: str, tokenizer: InputTokenizer, embedder: Embedder) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.requests = 0  # under way
        self._embedder = embedder
        self._stopping = False

    @property
    def ranks(self) -> bool:
        """Whether the model is a cross-encoder: `scores` is for those, and `embed` for all others."""
        return self._embedder.ranks

    @property
    def context_length(self) -> int:
        return self._embedder.context_length

    @property
    def vocab_size(self) -> int:
        """Ids below this are in the vocabulary of the model."""
        return self._embedder.vocab_size

    @property
    def dimensions(self) -> int:
        """Of a whole vector."""
        return self._embedder.hidden

    async def encode(self, texts: Sequence[str], most: int | None = None) -> list[tuple[int, ...]]:
        """The ids of texts with the model's markers; where `most` is given, each is cut to fit into so many."""
        return await asyncio.to_thread(lambda: [self.tokenizer.encode(text, most) for text in texts])

    async def encode_pairs(self, first: str, seconds: Sequence[str], most: int | None = None) -> list[TextPair]:
        """A text with each of others behind it; where `most` is given, those are cut to fit into so many ids."""

        def encode() -> list[TextPair]:
            ids, before = self.tokenizer.encode(first), self.tokenizer.markers_before
            room = None if most is None else max(0, most - len(ids)) + before
            return [TextPair((*ids, *self.tokenizer.encode(text, room)[before:]), len(ids)) for text in seconds]

        return await asyncio.to_thread(encode)

    async def embed(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """The vector of each, float32 [dimensions], of length 1. Raises what `scores` raises."""
        return await self._computed([partial(self._embedder.submit, ids) for ids in sequences])

    async def scores(self, pairs: Sequence[TextPair], *, raw: bool = False) -> list[float]:
        """How well the second text of each pair suits the first: from 0 to 1, or raw, the model's logit. Raises
        PromptTooLong; IndexError for ids that are not in the vocabulary; EngineError when the model is being
        stopped."""
        found = await self._computed([partial(self._embedder.submit, pair.ids, pair.second) for pair in pairs])
        return [float(score if raw else score.sigmoid()) for score in found]

    async def _computed(self, submits: Sequence[Callable[[], "Future[Tensor]"]]) -> list[Tensor]:
        """What each gives.

        Leaving early gives up what is not computed yet.
        """
        found: dict[int, Tensor] = {}
        left = iter(enumerate(submits))

        async def work() -> None:
            for place, submit in left:
                self._check_running()
                found[place] = await asyncio.wrap_future(submit())

        self.requests += 1
        workers = [asyncio.create_task(work()) for _ in range(self._embedder.threads)]
        try:
            await asyncio.gather(*workers)
        except asyncio.CancelledError:
            self._check_running()
            raise  # the caller is no longer interested
        finally:
            self.requests -= 1
            for worker in workers:
                worker.cancel()
        return [found[place] for place in range(len(submits))]

    async def stop(self) -> None:
        """Give up what waits; what is being computed is waited for."""
        self._stopping = True
        await asyncio.to_thread(self._embedder.close)

    def _check_running(self) -> None:
        if self._stopping:
            raise EngineError("The model is being stopped")


def shortened(vector: Tensor, dimensions: int | None) -> Tensor:
    """The first elements of a vector, as one of length 1 again (arXiv:2205.13147)."""
    return vector if dimensions in (None, len(vector)) else F.normalize(vector[:dimensions], dim=0)
