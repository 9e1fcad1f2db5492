"""Grammar masks: the tokens that constrained requests may sample, computed on a thread during the step."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.grammar import Constraint, Words
from engine.request import FinishReason, Request
from engine.step import SampledToken
from quant.errors import InglenookError

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Masks:
    """The allowed next tokens of the constrained requests of a step."""

    words: Words  # [constrained requests, ceil(vocabulary / 32)]
    # request id -> row of `words`; a request without a row and without a problem may sample any token
    mask_rows: dict[int, int]
    problems: dict[int, str]  # request id -> the reason why its grammar cannot continue

    def allows(self, request_id: int, token_id: int) -> bool:
        """Whether the request may sample the token. A negative id means no token and is always allowed."""
        mask_row = None if token_id < 0 else self.mask_rows.get(request_id)
        return mask_row is None or bool(self.words[mask_row, token_id // 32] >> (token_id % 32) & 1)

    def failure(self, request_id: int) -> SampledToken | None:
        """Return the result that ends a request whose grammar cannot continue; None if it can."""
        problem = self.problems.get(request_id)
        if problem is None:
            return None
        return SampledToken(request_id, None, problem=problem, reason=FinishReason.GRAMMAR)

    def allowed_ids(self, request_id: int, vocab_size: int, most: int) -> "NDArray[np.int64] | None":
        """Return the allowed tokens of a constrained request in order, int64; None if there are more than `most`."""
        words = self.words[self.mask_rows[request_id]]
        held = np.flatnonzero(words)  # most words are 0, so the others are gathered first
        if len(held) > most:
            return None
        which, bits = np.nonzero(np.unpackbits(words[held].view(np.uint8), bitorder="little").reshape(-1, 32))
        ids: NDArray[np.int64] = held[which] * 32 + bits
        return ids[ids < vocab_size] if len(ids) <= most else None

    def allowed_rows(self, request_ids: Sequence[int], vocab_size: int) -> "NDArray[np.bool_]":
        """Return the allowed tokens of these requests, constrained or not, as bool [requests, vocabulary]."""
        words = np.full((len(request_ids), self.words.shape[1]), -1, np.int32)
        for row, request_id in enumerate(request_ids):
            if (mask_row := self.mask_rows.get(request_id)) is not None:
                words[row] = self.words[mask_row]
        return np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)


NO_MASKS = Masks(np.empty((0, 0), np.int32), {}, {})


class MaskThread:
    """Computes masks on a separate thread while the step computes the logits."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._thread = ThreadPoolExecutor(1, "masks")  # the thread is created with the first mask

    def start(self, requests: Sequence[Request]) -> "Future[Masks] | None":
        """Start computing the masks of the constrained requests. Returns None if there are none.

        The requests must not get a token before the future is done.
        """
        constrained = [(it.id, it.constraint) for it in requests if it.constraint is not None]
        return self._thread.submit(self._masks, constrained) if constrained else None

    def _masks(self, constrained: Sequence[tuple[int, Constraint]]) -> Masks:
        masks = Masks(np.zeros((len(constrained), self._words), np.int32), {}, {})
        # all masks are started first, so that grammar processes work in parallel
        for request_id, constraint in constrained:
            _attempt(masks, request_id, constraint.prefetch_mask)
        for mask_row, (request_id, constraint) in enumerate(constrained):
            fill = partial(constraint.fill, masks.words[mask_row])
            if request_id not in masks.problems and _attempt(masks, request_id, fill):
                masks.mask_rows[request_id] = mask_row
        return masks


def _attempt(masks: Masks, request_id: int, work: Callable[[], T]) -> T | None:
    """Return the result of `work`. If it raises, record the problem, which ends only this request, and return None."""
    try:
        return work()
    except InglenookError as error:
        log.warning("request %d ends: %s", request_id, error.message)
        masks.problems[request_id] = error.message
    except Exception as error:
        log.exception("the grammar of request %d failed", request_id)
        masks.problems[request_id] = f"{type(error).__name__}: {error}"
    return None
