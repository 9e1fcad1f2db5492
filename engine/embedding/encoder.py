"""Encoders: models that read a whole text and answer with one vector, in which distance stands for meaning; or two
texts together, and answer with how well the second suits the first.

An encoder is no decoder: it has no cache and no next token, so that no scheduler is needed. Texts are computed one at a
time by each thread, so that a vector's bits depend on its own text alone. Refuses to know files, and text.
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

from engine.config import EncoderConfig
from engine.errors import PromptTooLong


class EncoderModel(Protocol):
    """A family's model, loaded."""

    config: EncoderConfig

    def forward(self, ids: Tensor, second: int | None = None) -> Tensor:
        """int64 [tokens], in range and no more than the context -> states float32 [tokens, hidden], on its device.

        Tokens from place `second` on are of a second text. Called by several threads at a time.
        """
        ...


class Embedder(Protocol):
    """What answers texts with vectors; or, as a cross-encoder, pairs of texts with one number. Safe for several callers
    at a time."""

    ranks: bool  # it is a cross-encoder
    hidden: int  # elements of a vector; 1 of a cross-encoder's
    vocab_size: int
    context_length: int  # most tokens of a text
    threads: int  # texts that it computes at a time

    def submit(self, ids: Sequence[int], second: int | None = None) -> "Future[Tensor]":
        """The vector of one text, float32 [hidden], of length 1, when it is its turn; one that is cancelled may never
        be computed. A cross-encoder is given both texts, the second from place `second` on, and answers with a logit,
        float32 [1]. Raises PromptTooLong; IndexError for an id that is not in the vocabulary."""
        ...

    def encode(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """The vectors of texts, float32 [texts, hidden]. Raises what `submit` raises."""
        ...

    def close(self) -> None:
        """Texts that are waiting are given up; returns when those under way are computed."""
        ...


class Pooling(enum.Enum):
    """How the states of a text's tokens become one vector."""

    MEAN = "mean"
    CLS = "cls"  # that of the first token
    LAST = "last"


_POOLED: Mapping[Pooling, Callable[[Tensor], Tensor]] = {
    Pooling.MEAN: lambda states: states.mean(0),
    Pooling.CLS: lambda states: states[0],
    Pooling.LAST: lambda states: states[-1],
}


def pooled(states: Tensor, pooling: Pooling) -> Tensor:
    """states float32 [tokens, hidden], of one text -> float32 [hidden], of length 1."""
    return F.normalize(_POOLED[pooling](states), dim=0)


def _one_thread() -> None:
    """A thread of torch's own for each of ours: where an operation is cut in two would show in its last bits."""
    torch.set_num_threads(1)


class Encoder:
    """A loaded encoder with threads of its own. Safe for several callers at a time."""

    def __init__(
        self,
        model: EncoderModel,
        pooling: Pooling,
        context_length: int,
        threads: int,
        begin: Callable[[], None] = _one_thread,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`context_length` is the most tokens of a text, no more than the model has positions; each thread begins with
        `begin`. With a `head`, from states to a number, it is a cross-encoder, and `pooling` means nothing."""
        self.ranks = head is not None
        self.hidden = model.config.hidden if head is None else 1
        self.vocab_size = model.config.vocab_size
        self.context_length = context_length
        self.threads = threads
        self._model = model
        self._answer = head or partial(pooled, pooling=pooling)
        self._pool = ThreadPoolExecutor(threads, "encoding", initializer=begin)

    def submit(self, ids: Sequence[int], second: int | None = None) -> "Future[Tensor]":
        """The vector of one text, or the number of a pair, float32 [hidden], when it is its turn: first come, first
        served.

        Raises PromptTooLong; IndexError for no ids, or one that is not in the vocabulary.
        """
        if len(ids) > self.context_length:
            raise PromptTooLong(
                f"The text has {len(ids)} tokens, and the model reads {self.context_length}", "Send it in pieces."
            )
        if not ids or not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise IndexError(f"a text has no token, or one that is not in the vocabulary of {self.vocab_size}")
        return self._pool.submit(self._vector, torch.tensor(ids), second)

    def encode(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """The vectors of texts, float32 [texts, hidden]. Raises what `submit` raises."""
        futures = [self.submit(ids) for ids in sequences]
        return torch.stack([future.result() for future in futures]) if futures else torch.empty(0, self.hidden)

    def _vector(self, ids: Tensor, second: int | None) -> Tensor:
        with torch.inference_mode():
            return self._answer(self._model.forward(ids, second)).cpu()

    def close(self) -> None:
        """Texts that are waiting are given up; returns when those under way are computed."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
