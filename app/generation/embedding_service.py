"""Embedding service: converts texts to vectors with an encoder, or pairs of texts to scores with a cross-encoder.

It serves any number of requests at a time with one loaded model. A request has at most as many texts in progress as the
model has threads, so that a request with one text does not wait for a request with a thousand.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.nn import functional as F

from app.errors import AppError, TextTooLong
from app.process.work_pool import Check, WorkPool
from app.text.long_texts import NO_LIMIT, TextLimit
from engine.embedding.encoder import Embedder
from engine.errors import EngineError

TEXT_THREADS = 2
STUCK_SECONDS = 60.0  # the service counts as stuck if texts wait and none is finished for this many seconds


class InputTooLong(AppError):
    """Text number `index` of a request has more tokens than the model's context: more than `least`."""

    def __init__(self, index: int, least: int) -> None:
        super().__init__(f"Text {index + 1} has more than {least:,} tokens", "Send it in pieces.")
        self.index = index
        self.least = least


class InputTokenizer(Protocol):
    """The tokenizer of an embedding model."""

    vocab_size: int
    markers_before: int  # number of marker ids before a text

    def encode(self, text: str, max_ids: int | None = None, limit: TextLimit = NO_LIMIT) -> tuple[int, ...]:
        """Return the ids of `text` with the model's markers. With `max_ids`, the text is cut so that they fit.

        Raises TextTooLong beyond the `limit`, unless the text is cut.
        """
        ...


class TextPair(NamedTuple):
    """The ids of two texts in one sequence, for a cross-encoder."""

    ids: tuple[int, ...]
    second: int  # index of the first id of the second text


class EmbeddingService:
    """Computes vectors of texts with an encoder, or scores of pairs of texts with a cross-encoder."""

    def __init__(
        self,
        name: str,
        tokenizer: InputTokenizer,
        embedder: Embedder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns seconds that never decrease."""
        self.name = name
        self.tokenizer = tokenizer
        self.requests = 0  # number of requests in progress
        self.texts = WorkPool("encoding texts", TEXT_THREADS)
        self._embedder = embedder
        self._clock = clock
        self._moved_at = clock()  # time at which a text was last finished, or at which the service became busy
        self._stopping = False

    @property
    def ranks(self) -> bool:
        """Whether the model is a cross-encoder. A cross-encoder provides `scores`, any other model provides `embed`."""
        return self._embedder.ranks

    @property
    def context_length(self) -> int:
        return self._embedder.context_length

    @property
    def vocab_size(self) -> int:
        """The size of the model's vocabulary. All ids are below it."""
        return self._embedder.vocab_size

    @property
    def dimensions(self) -> int:
        """The number of elements of a vector."""
        return self._embedder.hidden

    async def encode(self, texts: Sequence[str], max_ids: int | None = None) -> list[tuple[int, ...]]:
        """Return the ids of texts with the model's markers. With `max_ids`, each text is cut so that they fit.

        Raises InputTooLong.
        """
        return await self.texts.run(lambda check: self._encoded(texts, max_ids, check))

    async def encode_pairs(self, first: str, seconds: Sequence[str], max_ids: int | None = None) -> list[TextPair]:
        """Return the ids of the first text followed by each of the others. With `max_ids`, the others are cut to fit.

        Raises InputTooLong, in which index 0 means the first text.
        """

        def encode(check: Check) -> list[TextPair]:
            [ids], before = self._encoded([first], None, check), self.tokenizer.markers_before
            room = None if max_ids is None else max(0, max_ids - len(ids)) + before
            found = self._encoded(seconds, room, check, first_index=1)
            return [TextPair((*ids, *second[before:]), len(ids)) for second in found]

        return await self.texts.run(encode)

    def _encoded(
        self, texts: Sequence[str], max_ids: int | None, check: Check, first_index: int = 0
    ) -> list[tuple[int, ...]]:
        limit, found = TextLimit.of_context(self.context_length, check), []
        for index, text in enumerate(texts, first_index):
            check()
            try:
                found.append(self.tokenizer.encode(text, max_ids, limit))
            except TextTooLong as error:
                raise InputTooLong(index, error.least) from error
        return found

    @property
    def failure(self) -> str:
        """The error that ended the embedder for good; empty if there was none."""
        return self._embedder.failure

    def problem(self) -> str:
        """Return the reason why requests are stuck, or an empty string if no request is stuck."""
        if self.failure:
            return self.failure
        silence = self._clock() - self._moved_at if self.requests else 0.0
        return f"no text was finished for {silence:.0f} s" if silence >= STUCK_SECONDS else self.texts.problem()

    async def embed(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the vector of each sequence of ids: float32 [dimensions], of length 1. Raises what `scores` raises."""
        return await self._run_all([partial(self._embedder.submit, ids) for ids in sequences])

    async def scores(self, pairs: Sequence[TextPair], *, raw: bool = False) -> list[float]:
        """Return the relevance of each pair's second text to its first, from 0 to 1; with `raw`, the model's logit.

        Raises PromptTooLong, IndexError for ids outside of the vocabulary, and EngineError if the model is shutting
        down.
        """
        found = await self._run_all([partial(self._embedder.submit, pair.ids, pair.second) for pair in pairs])
        return [float(score if raw else score.sigmoid()) for score in found]

    async def _run_all(self, submits: Sequence[Callable[[], "Future[Tensor]"]]) -> list[Tensor]:
        """Submit all work items and return their results in order.

        Cancellation drops the items that have not started.
        """
        found: dict[int, Tensor] = {}
        left = iter(enumerate(submits))

        async def work() -> None:
            for index, submit in left:
                self._check_running()
                found[index] = await asyncio.wrap_future(submit())
                self._moved_at = self._clock()

        if not self.requests:
            self._moved_at = self._clock()
        self.requests += 1
        workers = [asyncio.create_task(work()) for _ in range(self._embedder.threads)]
        try:
            await asyncio.gather(*workers)
        except asyncio.CancelledError:
            self._check_running()
            raise  # the caller was canceled
        finally:
            self.requests -= 1
            for worker in workers:
                worker.cancel()
        return [found[index] for index in range(len(submits))]

    async def stop(self) -> None:
        """Drop the waiting texts, and wait until the texts in progress are finished."""
        self._stopping = True
        await asyncio.gather(self.texts.close(), asyncio.to_thread(self._embedder.close))

    def _check_running(self) -> None:
        if self._stopping:
            raise EngineError("The model is shutting down")


def truncate(vector: Tensor, dimensions: int | None) -> Tensor:
    """Return the first `dimensions` elements of a vector, scaled to length 1 (arXiv:2205.13147)."""
    return vector if dimensions in (None, len(vector)) else F.normalize(vector[:dimensions], dim=0)
