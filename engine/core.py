"""The engine: requests in, token events out, one step at a time.

It owns the scheduler and the runner, and exactly one thread may drive it (`engine.thread`).
"""

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from engine.config import EngineConfig
from engine.counters import EngineState
from engine.errors import InvalidSampling, OutOfMemory
from engine.kv.disk.store import DiskStore
from engine.kv.transfers import BlockTransfer
from engine.request import PROGRAM, Origin, Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.step import Runner, StepLimits, StepPlan, TicketT

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LaunchedStep(Generic[TicketT]):
    """A step that was launched and not collected."""

    plan: StepPlan
    ticket: TicketT
    began: float


class Engine(Generic[TicketT]):
    """One loaded model and the requests that it serves."""

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        runner: Runner[TicketT],
        block_transfer: BlockTransfer | None = None,
        store: DiskStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self._scheduler = Scheduler(config, block_transfer, store, clock)
        self._runner = runner
        self._under_way: deque[_LaunchedStep[TicketT]] = deque()
        self._collected = 0.0  # time when the last step was collected
        # Expected seconds of the current operation, from earlier steps; inf: not known. Read by other threads.
        self.expected_seconds = 0.0
        self._limits = StepLimits()
        self._ids = itertools.count(1)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def has_requests(self) -> bool:
        """Whether a caller waits for a request. Background copies may remain without one."""
        return self._scheduler.has_requests

    @property
    def progress(self) -> int:
        """Number of steps planned and copies ended so far. Read by other threads."""
        return self._scheduler.progress

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def state(self) -> EngineState:
        """Return the current numbers, of about the same moment. Any thread may call it."""
        return self._scheduler.state()

    def request(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        end_ids: frozenset[int],
        origin: Origin = PROGRAM,
    ) -> Request:
        """Create and validate a request for `add`. Changes no state, so any thread may call it.

        Raises PromptTooLong or InvalidSampling, or IndexError for an id that is not in the vocabulary.
        """
        params.check_vocabulary(self.vocab_size)
        ids = (*prompt_ids, *end_ids)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise IndexError(f"a token id is not in the vocabulary of {self.vocab_size} tokens")
        request = Request(next(self._ids), prompt_ids, params, end_ids, origin)
        if params.grammar is not None:
            request.constraint = params.grammar.start(jumps=params.logprobs is None)
        self._scheduler.validate_request(request)
        return request

    def search(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, end_ids: frozenset[int], origin: Origin = PROGRAM
    ) -> list[Request]:
        """Create the results of the beam search that `params.beams` describes, for `add` to take together.

        When the search ends, each result gets all its tokens at once, best result first. Aborting one result ends all.

        Raises the errors of `request`, and InvalidSampling or PromptTooLong if the search can never fit.
        """
        if params.beams is None:
            raise ValueError("params.beams is not set")
        results = [self.request(prompt_ids, params, end_ids, origin) for _ in range(params.beams.results)]
        if params.beams.width + len(end_ids) + len(params.stop_token_ids) > self.vocab_size:
            raise InvalidSampling("width", f"too wide for a vocabulary of {self.vocab_size} tokens")
        self._scheduler.validate_beam_search(results[0])
        return results

    def add(self, *requests: Request) -> None:
        """Queue a request, or the results of a beam search. Requests with the same prompt share its prefill."""
        self._scheduler.add(*requests)

    def step(self) -> list[TokenEvent]:
        """Launch up to `step_depth` steps, then collect the oldest. A step that fails ends only its own requests."""
        try:
            return self._step()
        finally:
            self.expected_seconds = 0.0

    def _step(self) -> list[TokenEvent]:
        while len(self._under_way) < self.config.step_depth:
            plan = self._scheduler.schedule(self._limits)
            if not plan.scheduled:
                break
            self.expected_seconds = self._scheduler.costs.steps.expected(plan.num_tokens) or math.inf
            try:
                began = time.monotonic()
                self._under_way.append(_LaunchedStep(plan, self._runner.launch(plan), began))
            except OutOfMemory as error:
                return self._handle_out_of_memory(plan, error, launched=False)
            except Exception as error:  # noqa: BLE001 # a kernel may raise anything; only the requests of this step end
                return self._handle_failure(plan, error)
        if not self._under_way:
            self.expected_seconds = math.inf
            self._scheduler.wait()
            return []
        step = self._under_way.popleft()
        try:
            sampled = self._runner.collect(step.ticket)
        except OutOfMemory as error:
            return self._handle_out_of_memory(step.plan, error, launched=True)
        except Exception as error:  # noqa: BLE001
            return self._handle_failure(step.plan, error)
        began, self._collected = max(step.began, self._collected), time.monotonic()
        self._scheduler.costs.steps.observe(step.plan.num_tokens, self._collected - began)
        self._limits.restore()
        return self._scheduler.update(step.plan, sampled)

    def _handle_out_of_memory(self, plan: StepPlan, error: OutOfMemory, *, launched: bool) -> list[TokenEvent]:
        """Retry a step that ran out of memory with fewer tokens. If it cannot be smaller, its request ends."""
        self._runner.recover()
        while launched and self._under_way:  # they depend on its results
            self._scheduler.undo(self._under_way.pop().plan)
        if not self._limits.halve(plan):
            return self._handle_failure(plan, error)
        log.warning("%s; a step of %d tokens is retried, possibly with fewer tokens", error, plan.num_tokens)
        self._scheduler.undo(plan)
        return []

    def _handle_failure(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        log.error("a step of %d requests failed", len(plan.scheduled), exc_info=error)
        return self._scheduler.fail(plan, f"{type(error).__name__}: {error}")

    def abort(self, request_id: int) -> list[TokenEvent]:
        """End a request in any state. Returns no events if it has ended already."""
        return self._scheduler.abort(request_id)

    def abort_all(self) -> list[TokenEvent]:
        """End every request, and drop the steps under way with their results."""
        forgotten = [step.plan for step in self._under_way]
        self._under_way.clear()
        return self._scheduler.abort_all(forgotten)

    def flush(self, seconds: float = 60.0) -> None:
        """Wait for the copies under way, and write dirty blocks to files; no write starts after `seconds`."""
        self._scheduler.flush(seconds)

    def forget(self, token_ids: Sequence[int], origin: Origin = PROGRAM, *, kept: int = 0) -> None:
        """Make the cached blocks of these tokens unfindable on the device, in RAM, and in files, except for the first
        `kept`.
        """
        self._scheduler.forget(token_ids, origin, kept)

    def assert_empty(self) -> None:
        """Raise RuntimeError if a request or a block is still held."""
        self._scheduler.assert_empty()
