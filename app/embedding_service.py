"""The embedding service: from texts to vectors, over one loaded model, for any number of requests at a time.

Requests share the model's threads fairly: each has no more texts under way than there are threads, so that one of a
thousand texts lets another one's single text in between. Knows nothing of wire formats.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from engine.encoder import Embedder
from engine.errors import EngineError


class InputTokenizer(Protocol):
    """A vocabulary as an embedding model reads it."""

    vocab_size: int

    def encode(self, text: str, most: int | None = None) -> tuple[int, ...]:
        """The ids of `text` with the model's markers; where `most` is given, the text is cut to fit into so many."""
        ...


class EmbeddingService:
    """Answers texts with vectors by one model."""

    def __init__(self, name: str, tokenizer: InputTokenizer, embedder: Embedder) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.requests = 0  # under way
        self._embedder = embedder
        self._stopping = False

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

    async def embed(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """The vector of each, float32 [dimensions], of length 1.

        Leaving early gives up what is not computed yet. Raises PromptTooLong; IndexError for ids that are not in the
        vocabulary; EngineError when the model is being stopped.
        """
        vectors: dict[int, Tensor] = {}
        left = iter(enumerate(sequences))

        async def work() -> None:
            for place, ids in left:
                self._check_running()
                vectors[place] = await asyncio.wrap_future(self._embedder.submit(ids))

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
        return [vectors[place] for place in range(len(sequences))]

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
