"""The embedding service: from texts to vectors, or from pairs of texts to how well the second suits the first, over
one loaded model, for any number of requests at a time.

Requests share the model's threads fairly: each has no more texts under way than there are threads, so that one of a
thousand texts lets another one's single text in between. Knows nothing of wire formats.
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
STUCK_SECONDS = 60.0  # without a text that is computed, while some wait


class InputTooLong(AppError):
    """The text at a place of a request has more tokens than the model reads: `least` or more."""

    def __init__(self, index: int, least: int) -> None:
        super().__init__(f"Text {index + 1} has more than {least:,} tokens", "Send it in pieces.")
        self.index = index
        self.least = least


class InputTokenizer(Protocol):
    """A vocabulary as an embedding model reads it."""

    vocab_size: int
    markers_before: int  # a text: how many of its ids are there

    def encode(self, text: str, max_ids: int | None = None, limit: TextLimit = NO_LIMIT) -> tuple[int, ...]:
        """The ids of `text` with the model's markers; where `max_ids` is given, the text is cut to fit into so many.
        Raises TextTooLong beyond the `limit`, but for a text that is cut."""
        ...


class TextPair(NamedTuple):
    """Two texts as a cross-encoder reads them."""

    ids: tuple[int, ...]
    second: int  # where the second text begins


class EmbeddingService:
    """Answers texts with vectors by one model; or pairs of texts with numbers, where that is a cross-encoder."""

    def __init__(
        self,
        name: str,
        tokenizer: InputTokenizer,
        embedder: Embedder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` tells seconds that only grow."""
        self.name = name
        self.tokenizer = tokenizer
        self.requests = 0  # under way
        self.texts = WorkPool("encoding texts", TEXT_THREADS)
        self._embedder = embedder
        self._clock = clock
        self._moved_at = clock()  # when a text was last computed, or none was waited for
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

    async def encode(self, texts: Sequence[str], max_ids: int | None = None) -> list[tuple[int, ...]]:
        """The ids of texts with the model's markers; where `max_ids` is given, each is cut to fit into so many. Raises
        InputTooLong."""
        return await self.texts.run(lambda check: self._encoded(texts, max_ids, check))

    async def encode_pairs(self, first: str, seconds: Sequence[str], max_ids: int | None = None) -> list[TextPair]:
        """A text with each of others behind it; where `max_ids` is given, those are cut to fit into so many ids. Raises
        InputTooLong, in which the first text is at place 0."""

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

    def problem(self) -> str:
        """Why requests would wait in vain, or an empty string while they are served."""
        silence = self._clock() - self._moved_at if self.requests else 0.0
        return f"no text was computed for {silence:.0f} s" if silence >= STUCK_SECONDS else self.texts.problem()

    async def embed(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """The vector of each, float32 [dimensions], of length 1. Raises what `scores` raises."""
        return await self._run_all([partial(self._embedder.submit, ids) for ids in sequences])

    async def scores(self, pairs: Sequence[TextPair], *, raw: bool = False) -> list[float]:
        """How well the second text of each pair suits the first: from 0 to 1, or raw, the model's logit. Raises
        PromptTooLong; IndexError for ids that are not in the vocabulary; EngineError when the model is being
        stopped."""
        found = await self._run_all([partial(self._embedder.submit, pair.ids, pair.second) for pair in pairs])
        return [float(score if raw else score.sigmoid()) for score in found]

    async def _run_all(self, submits: Sequence[Callable[[], "Future[Tensor]"]]) -> list[Tensor]:
        """What each gives.

        Leaving early gives up what is not computed yet.
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
            raise  # the caller is no longer interested
        finally:
            self.requests -= 1
            for worker in workers:
                worker.cancel()
        return [found[index] for index in range(len(submits))]

    async def stop(self) -> None:
        """Give up what waits; what is being computed is waited for."""
        self._stopping = True
        await asyncio.gather(self.texts.close(), asyncio.to_thread(self._embedder.close))

    def _check_running(self) -> None:
        if self._stopping:
            raise EngineError("The model is being stopped")


def truncate(vector: Tensor, dimensions: int | None) -> Tensor:
    """The first elements of a vector, as one of length 1 again (arXiv:2205.13147)."""
    return vector if dimensions in (None, len(vector)) else F.normalize(vector[:dimensions], dim=0)
