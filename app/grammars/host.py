"""The server's side of a grammar process, which compiles one grammar and computes the masks of replies that follow it.

A process that exceeds a limit ends. Only the replies with its grammar fail.
"""

import collections
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from app.errors import GrammarsUnavailable, InvalidGrammar
from app.grammars.frames import (
    ACCEPT,
    LOOK_AHEAD,
    MASK,
    SIMPLIFY,
    Accepted,
    Channel,
    ConnectionLost,
    Frame,
    GrammarLimits,
    GrammarText,
    Kind,
    Problem,
    packed_ids,
    unpacked_ids,
)
from app.grammars.process_streams import START_SECONDS, ProcessStream
from engine.grammar import Constraint, Words

log = logging.getLogger(__name__)

# Longest time that a step waits until its grammars have accepted a token, and again for their masks. A process ends
# itself when its CPU time is used up, which takes much less. A step only waits this long if the machine gives the
# process no CPU time.
STEP_SECONDS: Final = 10.0
_SLACK_SECONDS: Final = 1.0  # additional seconds for a process to report that it reached its own limit
_WEIGHT: Final = 0.1  # weight of the latest mask in the average time of a mask


class GrammarFailed(InvalidGrammar):
    """A compiled grammar is too complex to compute the next mask of a reply in time."""


class GrammarProcess:
    """A grammar whose masks a separate process computes. Implements `engine.grammar.Grammar`.

    `tokenize` returns the ids of a text that continues another text.
    """

    def __init__(
        self, stream: ProcessStream, tokenize: Callable[[bytes], Sequence[int]], limits: GrammarLimits, *, jumps: bool
    ) -> None:
        self._stream = stream
        self._tokenize = tokenize
        self._limits = limits
        self._jumps = jumps
        self._channel = Channel(stream.receive, stream.send)
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._answers: dict[int, Frame] = {}  # answers that arrived while waiting for another reply's answer
        self._ended: collections.deque[int] = collections.deque()  # replies whose state the process can drop
        self._numbers = itertools.count(1)
        self._problem = ""  # reason why the process was ended; empty while it runs
        self._mask_seconds = 0.0  # average time until a mask arrives
        self.end = stream.end
        weakref.finalize(self, stream.close)

    @property
    def is_alive(self) -> bool:
        return not self._problem

    def compile(self, source: GrammarText) -> None:
        """Compile a grammar. Raises InvalidGrammar, and GrammarsUnavailable if the process did not start."""
        self._stream.limit(START_SECONDS)
        try:
            self._channel.receive()
        except (ConnectionLost, TimeoutError) as error:
            raise GrammarsUnavailable("The process for the grammar did not start", "Try again.") from error
        wall = self._limits.compile_wall_seconds
        self._stream.limit(wall + _SLACK_SECONDS)
        try:
            self._send(Frame(Kind.COMPILE, payload=source.packed()))
            answer = self._answer(0)
        except (ConnectionLost, TimeoutError) as error:
            most = f"{wall:g} seconds or {self._limits.memory_bytes >> 20} MB"
            raise InvalidGrammar(f"It is too complex: compiling it takes more than {most}. {SIMPLIFY}") from error
        if answer.payload:
            problem = Problem.unpacked(answer.payload)
            if problem.trace:
                log.error("a grammar failed to compile:\n%s", problem.trace)
            raise InvalidGrammar(problem.message, path=problem.path)

    def start(self, *, jumps: bool) -> Constraint:
        return _GrammarConstraint(self, next(self._numbers), jumps=jumps and self._jumps)

    def send(self, frame: Frame) -> None:
        """Send a frame about a reply. Raises GrammarFailed."""
        try:
            while self._ended:
                self._send(Frame(Kind.END, self._ended.popleft()))
            self._send(frame)
        except ConnectionLost as error:
            raise self._failed("it exceeded its limits of time and memory") from error

    def receive(self, reply: int, seconds: float) -> Frame:
        """Return the next frame about a reply. Raises GrammarFailed."""
        try:
            self._stream.limit(seconds)
            answer = self._answer(reply)
        except TimeoutError as error:
            raise self._failed(f"a step took more than {STEP_SECONDS:g} s") from error
        except (ConnectionLost, OSError) as error:
            raise self._failed("it exceeded its limits of time and memory") from error
        if answer.kind is Kind.FAILED:
            raise GrammarFailed(answer.payload.decode())
        return answer

    def observe_mask(self, seconds: float) -> None:
        """Record the time until a mask arrived."""
        self._mask_seconds += (seconds - self._mask_seconds) * (_WEIGHT if self._mask_seconds else 1.0)

    def masks_within(self, seconds: float) -> int:
        """Return the number of masks that are expected to arrive within `seconds`."""
        return int(seconds / max(self._mask_seconds, 1e-6))

    def release(self, reply: int) -> None:
        """Drop the state of an ended reply. Thread-safe, and safe during another call."""
        self._ended.append(reply)

    def _failed(self, problem: str) -> GrammarFailed:
        self._problem = self._problem or problem
        self.end()
        return GrammarFailed(f"It is too complex: {self._problem}. {SIMPLIFY}")

    def _send(self, frame: Frame) -> None:
        with self._sending:
            self._channel.send(frame)

    def _answer(self, reply: int) -> Frame:
        with self._receiving:
            while reply not in self._answers:
                frame = self._channel.receive()
                if frame.kind is Kind.TOKENIZE:
                    ids = self._tokenize(frame.payload)
                    self._send(Frame(Kind.TOKENIZED, payload=packed_ids(ids)))
                else:
                    self._answers[frame.reply] = frame
            return self._answers.pop(reply)


class _GrammarConstraint:
    """See `engine.grammar.Constraint`."""

    def __init__(self, process: GrammarProcess, number: int, *, jumps: bool) -> None:
        self._process = process
        self._number = number
        self._jumps = jumps
        # time at which the unanswered request was sent; None: no request is waiting
        self._asked_at: float | None = None
        self._failure: GrammarFailed | None = None
        self._accepted: collections.deque[Accepted] = collections.deque()  # results of the next calls of `accept`
        self.ended = False
        weakref.finalize(self, process.release, number).atexit = False

    def prefetch_mask(self, runs: int = 0) -> None:
        if self._failure is not None:
            raise self._failure
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._process.send(Frame(Kind.MASK, self._number, MASK.pack(runs)))

    def fill(self, words: Words, runs: int = 0) -> bool:
        self.prefetch_mask(runs)
        asked_at = self._asked_at or 0.0
        answer = self._answer()
        self._process.observe_mask(time.monotonic() - asked_at)
        mask = np.frombuffer(answer.payload, np.int32)[: len(words)]
        words[: len(mask)] = mask
        return True

    def prefetch_look_ahead(self, drafted: Sequence[int], seconds: float) -> None:
        # one of the masks is for the token before the draft
        if (most := min(len(drafted), self._process.masks_within(seconds) - 1)) > 0:
            self._ask(Kind.LOOK_AHEAD, LOOK_AHEAD.pack(self._jumps, most) + packed_ids(drafted))

    def look_ahead(self, drafted: Sequence[int], seconds: float) -> Sequence[int]:
        if self._asked_at is None:
            self.prefetch_look_ahead(drafted, seconds)
        answer = self._answer_or_failure()
        return () if answer is None else unpacked_ids(answer.payload)

    def prefetch_accept(self, token_ids: Sequence[int]) -> None:
        self._ask(Kind.ACCEPT, ACCEPT.pack(self._jumps) + packed_ids(token_ids))

    def accept(self, token_id: int) -> Sequence[int]:
        if not self._accepted:
            if self._asked_at is None:
                self.prefetch_accept((token_id,))
            answer = self._answer_or_failure()
            if answer is None:
                return ()
            self._accepted.extend(Accepted.unpacked(answer.payload))
        accepted = self._accepted.popleft()
        self.ended = accepted.ended
        return accepted.forced

    def _ask(self, kind: Kind, payload: bytes) -> None:
        """Send a request, unless one is unanswered. The next mask raises an error."""
        if self._failure is None and self._asked_at is None:
            self._asked_at = time.monotonic()
            try:
                self._process.send(Frame(kind, self._number, payload))
            except GrammarFailed as failure:
                self._failure = failure

    def _answer_or_failure(self) -> Frame | None:
        """Return the answer to the last request. Returns None if there is none; the next mask raises an error."""
        if self._failure is not None or self._asked_at is None:
            return None
        try:
            return self._answer()
        except GrammarFailed as failure:
            self._failure = failure
            return None

    def _answer(self) -> Frame:
        """Return the answer to the last request, within the time limit that all grammars of a step share."""
        waited = time.monotonic() - (self._asked_at or 0.0)
        self._asked_at = None
        return self._process.receive(self._number, max(0.01, STEP_SECONDS - waited))
