"""Encoders: models that map a text to a vector, or, as cross-encoders, a pair of texts to a relevance score.

An encoder has no KV cache and no next token, so it needs no scheduler. Each thread computes one text at a time, so the
bits of a vector depend only on its own text.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.backends.device_errors import raising_device_lost
from engine.errors import DeviceLost, PromptTooLong
from engine.freed_memory import trim
from engine.model_config import EncoderConfig
from engine.request import ServiceClass
from engine.scheduling.priority import WEIGHTS
from engine.turns import Turn, Turns


class EncoderModel(Protocol):
    """A loaded model of an encoder family."""

    config: EncoderConfig

    def forward(self, ids: Tensor, second_start: int | None = None) -> Tensor:
        """Return the states of a text, float32 [tokens, hidden], on the model's device.

        `ids` is int64 [tokens]: valid token ids, at most `context_length` of them. Tokens from index `second_start`
        on belong to a second text. Must be thread-safe.
        """
        ...


class Embedder(Protocol):
    """Computes vectors of texts, or, as a cross-encoder, scores of pairs of texts. Thread-safe."""

    ranks: bool  # whether it is a cross-encoder
    hidden: int  # elements per vector; 1 for a cross-encoder
    vocab_size: int
    context_length: int  # maximum number of tokens per text
    threads: int  # number of texts that are computed at the same time

    def submit(self, ids: Sequence[int], second_start: int | None = None) -> "Future[Tensor]":
        """Submit one text. Returns a future of its vector, float32 [hidden], normalized. The future can be cancelled.

        A cross-encoder takes both texts in `ids`, the second from index `second_start` on, and returns a logit, float32
        [1]. Raises PromptTooLong, and IndexError for a token id outside the vocabulary.
        """
        ...

    def encode(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the vectors of texts, float32 [texts, hidden]. Raises the errors of `submit`."""
        ...

    @property
    def failure(self) -> str:
        """The error that ended the embedder for good; empty if there was none."""
        ...

    def close(self) -> None:
        """Cancel all waiting texts, and free the memory when the running ones have been computed."""
        ...


class Pooling(enum.Enum):
    """How the states of a text's tokens are reduced to one vector."""

    MEAN = "mean"
    CLS = "cls"  # the first token's state
    LAST = "last"


_POOLING_FUNCTIONS: Mapping[Pooling, Callable[[Tensor], Tensor]] = {
    Pooling.MEAN: lambda states: states.mean(0),
    Pooling.CLS: lambda states: states[0],
    Pooling.LAST: lambda states: states[-1],
}


def pool_states(states: Tensor, pooling: Pooling) -> Tensor:
    """Reduce the states of one text, float32 [tokens, hidden], to a normalized vector, float32 [hidden]."""
    return F.normalize(_POOLING_FUNCTIONS[pooling](states), dim=0)


def _one_thread() -> None:
    """Make torch use one thread, because the number of threads changes the last bits of a result."""
    torch.set_num_threads(1)


class Encoder:
    """A loaded encoder with its own threads. Thread-safe."""

    def __init__(
        self,
        model: EncoderModel,
        pooling: Pooling,
        context_length: int,
        threads: int,
        initializer: Callable[[], None] = _one_thread,
        head: Callable[[Tensor], Tensor] | None = None,
        synchronize: Callable[[], None] = lambda: None,
        drop_caches: Callable[[], None] = lambda: None,
        turn: Turn | None = None,
    ) -> None:
        """Start the threads of an encoder.

        `context_length` limits the tokens of a text; it is at most the number of the model's positions. `initializer`
        runs once in each thread. With a `head`, which maps states to a score, the encoder is a cross-encoder, and
        `pooling` is ignored. `synchronize` waits for the model's device, and fails if the device is lost. `drop_caches`
        returns the free memory of the device to its driver. `turn`: the order of texts and the steps of other models;
        None: texts are computed at once.
        """
        self.ranks = head is not None
        self.hidden = model.config.hidden if head is None else 1
        self.vocab_size = model.config.vocab_size
        self.context_length = context_length
        self.threads = threads
        self.failure = ""
        self._model = model
        self._synchronize = synchronize
        self._drop_caches = drop_caches
        self._turn = Turns().join() if turn is None else turn
        self._is_closed = False
        self._answer = head or partial(pool_states, pooling=pooling)
        self._pool = ThreadPoolExecutor(threads, "encoding", initializer=initializer)

    def submit(self, ids: Sequence[int], second_start: int | None = None) -> "Future[Tensor]":
        """Submit one text or a pair. Returns a future of its vector, float32 [hidden], or its score, float32 [1].

        Texts are computed in the order of submission. Raises PromptTooLong, or IndexError if there are no token ids or
        one is outside the vocabulary.
        """
        if len(ids) > self.context_length:
            raise PromptTooLong(
                f"The text has {len(ids)} tokens, but the model reads at most {self.context_length}",
                "Split the text into shorter pieces.",
            )
        if not ids or not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise IndexError(
                f"a text has no tokens, or a token id is not in the vocabulary of {self.vocab_size} tokens"
            )
        return self._pool.submit(self._vector, torch.tensor(ids), second_start)

    def encode(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the vectors of texts, float32 [texts, hidden]. Raises the errors of `submit`."""
        futures = [self.submit(ids) for ids in sequences]
        return torch.stack([future.result() for future in futures]) if futures else torch.empty(0, self.hidden)

    def _vector(self, ids: Tensor, second_start: int | None) -> Tensor:
        self._turn.begin(WEIGHTS[ServiceClass.NORMAL])
        try:
            with torch.inference_mode(), raising_device_lost(self._synchronize):
                return self._answer(self._model.forward(ids, second_start)).cpu()
        except DeviceLost as error:
            self.failure = error.message
            raise
        finally:
            self._turn.end()

    def close(self) -> None:
        """Cancel all waiting texts, and free the memory when the running ones have been computed."""
        self._pool.shutdown(cancel_futures=True)
        if not self._is_closed:
            self._is_closed = True
            del self._model, self._answer
            self._turn.close()
            trim()
            self._drop_caches()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
