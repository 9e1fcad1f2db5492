"""Grammar masks: the tokens that constrained requests may sample, computed on a thread during the step."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.grammar import Constraint, Words
from engine.request import FinishReason, Request
from engine.step import SampledToken, ScheduledRequest
from quant.errors import InglenookError

log = logging.getLogger(__name__)

POLL_SECONDS = 0.0002  # interval at which the end of a step is noticed
T = TypeVar("T")
TokenPosition: TypeAlias = tuple[int, int]  # id of a request, and index of a token in its reply


def next_position(request: Request) -> TokenPosition:
    """Return the position of the next token of a request."""
    return request.id, len(request.output_ids)


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens that the constrained requests of a step may sample."""

    words: Words  # [positions, ceil(vocabulary / 32)]
    # position -> row of `words`; a position without a row, of a request without a problem, may have any token
    mask_rows: dict[TokenPosition, int]
    problems: dict[int, str]  # request id -> the reason why its grammar cannot continue
    late: set[TokenPosition] = field(default_factory=set)  # positions after drafted tokens whose masks are not known

    def allows(self, position: TokenPosition, token_id: int) -> bool:
        """Whether a position may have the token. A negative id means no token and is always allowed."""
        mask_row = None if token_id < 0 else self.mask_rows.get(position)
        return mask_row is None or bool(self.words[mask_row, token_id // 32] >> (token_id % 32) & 1)

    def failure(self, request_id: int) -> SampledToken | None:
        """Return the result that ends a request whose grammar cannot continue; None if it can."""
        problem = self.problems.get(request_id)
        if problem is None:
            return None
        return SampledToken(request_id, None, problem=problem, reason=FinishReason.GRAMMAR)

    def allowed_ids(self, position: TokenPosition, vocab_size: int, most: int) -> "NDArray[np.int64] | None":
        """Return the tokens allowed at a position with a mask, in order, int64; None if there are more than `most`."""
        words = self.words[self.mask_rows[position]]
        held = np.flatnonzero(words)  # most words are 0, so the others are gathered first
        if len(held) > most:
            return None
        which, bits = np.nonzero(np.unpackbits(words[held].view(np.uint8), bitorder="little").reshape(-1, 32))
        ids: NDArray[np.int64] = held[which] * 32 + bits
        return ids[ids < vocab_size] if len(ids) <= most else None

    def allowed_rows(self, positions: Sequence[TokenPosition], vocab_size: int) -> "NDArray[np.bool_]":
        """Return the tokens allowed at these positions, with and without masks, as bool [positions, vocabulary]."""
        words = np.full((len(positions), self.words.shape[1]), -1, np.int32)
        for row, position in enumerate(positions):
            if (mask_row := self.mask_rows.get(position)) is not None:
                words[row] = self.words[mask_row]
        return np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)


NO_MASKS = Masks(np.empty((0, 0), np.int32), {}, {})


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """Masks that the thread is computing."""

    _masks: "Future[Masks]"
    _is_late: threading.Event

    def result(self, timeout: float | None = None) -> Masks:
        """Return the masks. Positions after drafted tokens are late if their masks have not been started by now."""
        self._is_late.set()
        return self._masks.result(timeout)

    def result_within(self, is_over: Callable[[], bool]) -> Masks:
        """Return the masks. Those after drafted tokens are late if they have not been started when `is_over` is
        true.
        """
        while not self._masks.done() and not is_over():
            wait([self._masks], POLL_SECONDS)
        return self.result()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A mask to compute: at `position`, which follows the first `runs` drafted runs."""

    position: TokenPosition
    constraint: Constraint
    runs: int


class MaskThread:
    """Computes masks on a separate thread while the step computes the logits."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._thread = ThreadPoolExecutor(1, "masks")  # the thread is created with the first mask
        self._last: PendingMasks | None = None

    def start(self, parts: Sequence[ScheduledRequest]) -> PendingMasks | None:
        """Start computing the masks of the constrained requests of a step. Returns None if there are none.

        The requests must not get a token before the result is known.
        """
        wanted = [it for part in parts if part.samples for it in _wanted(part)]
        if not wanted:
            return None
        is_late = threading.Event()
        self._last = PendingMasks(self._thread.submit(self._masks, wanted, is_late), is_late)
        return self._last

    def finish(self) -> None:
        """Wait until the thread uses no constraint. Only needed for steps whose result is not used."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """End the thread after the masks under way."""
        self._thread.shutdown()
        self._last = None

    def _masks(self, wanted: Sequence[_Wanted], is_late: threading.Event) -> Masks:
        late = {it.position for it in wanted if it.runs}
        masks = Masks(np.zeros((len(wanted), self._words), np.int32), {}, {}, late)
        # A mask after drafted tokens that fails is late: its tokens may be wrong, and then the failure has no effect.
        ignored: dict[int, str] = {}
        for runs in sorted({it.runs for it in wanted}):
            if runs and is_late.is_set():
                break
            problems = ignored if runs else masks.problems
            rows = [row for row, it in enumerate(wanted) if it.runs == runs and it.position[0] not in ignored]
            # all masks are started first, so that grammar processes work in parallel
            for it in (wanted[row] for row in rows):
                _attempt(problems, it.position[0], partial(it.constraint.prefetch_mask, runs))
            for row in rows:
                _fill(masks, problems, row, wanted[row])
        for request_id, problem in masks.problems.items():
            log.warning("request %d ends: %s", request_id, problem)
        return masks


def _wanted(part: ScheduledRequest) -> Sequence[_Wanted]:
    """Return the masks that a part of a step needs."""
    return [
        _Wanted((request_id, index + drafted), request.constraint, runs)
        for request in part.sampling_requests
        if request.constraint is not None
        for request_id, index in (next_position(request),)
        for runs, drafted in enumerate(part.draft.samples)
    ]


def _fill(masks: Masks, problems: dict[int, str], row: int, wanted: _Wanted) -> None:
    request_id, _ = wanted.position
    fill = partial(wanted.constraint.fill, masks.words[row], wanted.runs)
    if request_id not in problems and _attempt(problems, request_id, fill):
        masks.mask_rows[wanted.position] = row
    if request_id not in problems:
        masks.late.discard(wanted.position)


def _attempt(problems: dict[int, str], request_id: int, work: Callable[[], T]) -> T | None:
    """Return the result of `work`. If it raises, record the problem, which ends only this request, and return None."""
    try:
        return work()
    except InglenookError as error:
        problems[request_id] = error.message
    except Exception as error:
        log.exception("the grammar of request %d failed", request_id)
        problems[request_id] = f"{type(error).__name__}: {error}"
    return None
