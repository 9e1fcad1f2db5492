"""The engine: takes requests and returns token events, one step at a time.

It owns the scheduler and the runner, and exactly one thread may drive it (`engine.thread`).
"""

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Generic

from engine.config import EngineConfig
from engine.counters import EngineState
from engine.drafting.draft_model import DraftModel
from engine.errors import DeviceLost, EngineError, InvalidSampling, OutOfMemory
from engine.freed_memory import release_frames, trim
from engine.kv.blocks import BlockPool
from engine.kv.disk.store import DiskStore
from engine.kv.parked_cache import ParkedCache
from engine.kv.transfers import BlockTransfer
from engine.request import PROGRAM, FinishReason, Origin, Request, TokenEvent, message_ends
from engine.sampling_params import SamplingParams
from engine.scheduling.priority import WEIGHTS
from engine.scheduling.scheduler import Scheduler
from engine.step import Runner, StepLimits, StepPlan, TicketT
from engine.turns import Turn, Turns

log = logging.getLogger(__name__)


Park = Callable[[Sequence[BlockPool], Sequence[BlockPool]], ParkedCache]


@dataclass(frozen=True, slots=True)
class _LaunchedStep(Generic[TicketT]):
    """A step that was launched but has not been collected."""

    plan: StepPlan
    ticket: TicketT
    began: float
    preparations: int  # the runner's number before the launch


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
        turn: Turn | None = None,
        park: Park | None = None,
    ) -> None:
        """`turn`: the order of steps among the engines that compute on the CPU; None: steps start at once.

        `park` parks the cache, given the index of its pools and of its host pools; None: the cache cannot be parked.
        """
        self._park = park
        self.config = config
        self.vocab_size = vocab_size
        self._scheduler = Scheduler(config, block_transfer, store, clock)
        self._runner = runner
        self._turn = Turns().join() if turn is None else turn
        self._under_way: deque[_LaunchedStep[TicketT]] = deque()
        self._collected = 0.0  # time at which the last step was collected
        # Expected seconds of the current step, estimated from earlier steps; inf if unknown. Other threads read it.
        self.expected_seconds = 0.0
        self._limits = StepLimits()
        self._ids = itertools.count(1)
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished. Background copies may still run after the last request has ended."""
        return self._scheduler.has_requests

    @property
    def progress(self) -> int:
        """Number of steps planned and copies completed so far. Other threads read it."""
        return self._scheduler.progress

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def state(self) -> EngineState:
        """Return a snapshot of the engine's counters. Any thread may call this."""
        return replace(self._scheduler.state(), failed_captures=self._runner.failed_captures)

    def request(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        end_ids: frozenset[int],
        origin: Origin = PROGRAM,
        marks: tuple[int, ...] = (),
    ) -> Request:
        """Create and validate a request for `add`. Changes no state, so any thread may call this.

        `marks`: see `Request.marks`; empty: the ends of all messages.
        Raises PromptTooLong or InvalidSampling, or IndexError for a token id that is not in the vocabulary.
        """
        params.check_vocabulary(self.vocab_size)
        ids = (*prompt_ids, *end_ids)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise IndexError(f"a token id is not in the vocabulary of {self.vocab_size} tokens")
        if self.config.has_states and not marks:
            marks = message_ends(prompt_ids, end_ids)
        request = Request(next(self._ids), prompt_ids, params, end_ids, origin, marks)
        if params.grammar is not None:
            request.constraint = params.grammar.start(jumps=params.logprobs is None)
        self._scheduler.validate_request(request)
        return request

    def search(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        end_ids: frozenset[int],
        origin: Origin = PROGRAM,
        marks: tuple[int, ...] = (),
    ) -> list[Request]:
        """Create one request per result of the beam search that `params.beams` describes. Pass them to `add` together.

        When the search ends, each result gets all its tokens at once, best result first. Aborting one result aborts all
        of them.

        Raises the errors of `request`, and InvalidSampling or PromptTooLong if the search can never fit.
        """
        if params.beams is None:
            raise ValueError("params.beams is not set")
        results = [self.request(prompt_ids, params, end_ids, origin, marks) for _ in range(params.beams.results)]
        if params.beams.width + len(end_ids) + len(params.stop_token_ids) > self.vocab_size:
            raise InvalidSampling("width", f"too wide for a vocabulary of {self.vocab_size} tokens")
        self._scheduler.validate_beam_search(results[0])
        return results

    def draft_with(self, model: DraftModel) -> None:
        """Let a small model draft tokens where this is faster. Requires `config.drafts`."""
        self._scheduler.draft_with(model)

    def add(self, *requests: Request) -> None:
        """Queue one request, several with the same prompt, or the results of a beam search. A shared prompt is
        prefilled once.
        """
        self._check_open()
        self._scheduler.add(*requests)

    def step(self) -> list[TokenEvent]:
        """Launch steps until `step_depth` are under way, then collect the oldest. A failed step ends only its own
        requests. Raises DeviceLost if no later step can run.
        """
        self._check_open()
        try:
            return self._step()
        finally:
            self.expected_seconds = 0.0
            self._turn.end(returns=self.has_requests)

    def _step(self) -> list[TokenEvent]:
        while len(self._under_way) < self.config.step_depth:
            plan = self._scheduler.schedule(self._limits, self._turn.other_streams)
            if not plan.scheduled:
                break
            self.expected_seconds = self._scheduler.costs.steps.expected(plan.num_tokens) or math.inf
            if not self._turn.is_taken:
                self._turn.begin(_weight(plan), sum(part.samples for part in plan.scheduled))
            try:
                began, preparations = time.monotonic(), self._runner.preparations
                self._under_way.append(_LaunchedStep(plan, self._runner.launch(plan), began, preparations))
            except OutOfMemory as error:
                return self._handle_out_of_memory(plan, error, launched=False)
            except DeviceLost:
                raise
            except Exception as error:  # noqa: BLE001 # a kernel may raise anything; only the requests of this step end
                return self._handle_failure(plan, error)
        if not self._under_way:
            self.expected_seconds = math.inf
            self._scheduler.wait()
            return []
        return self._collect()

    def _collect(self) -> list[TokenEvent]:
        """Wait for the oldest step under way, and return its events."""
        step = self._under_way.popleft()
        try:
            sampled = self._runner.collect(step.ticket)
        except OutOfMemory as error:
            return self._handle_out_of_memory(step.plan, error, launched=True)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001
            return self._handle_failure(step.plan, error)
        self._turn.end(returns=self.has_requests)
        began, self._collected = max(step.began, self._collected), time.monotonic()
        if self._runner.preparations == step.preparations:  # otherwise this step, or one launched after it, was slow
            seconds = self._collected - began
            self._scheduler.costs.steps.observe(step.plan.num_tokens, seconds, step.plan.num_drafted)
        self._limits.restore()
        return self._scheduler.update(step.plan, sampled)

    def _handle_out_of_memory(self, plan: StepPlan, error: OutOfMemory, *, launched: bool) -> list[TokenEvent]:
        """Retry a step that ran out of memory with fewer tokens. If it cannot be made smaller, its requests end."""
        release_frames(error)  # a traceback references the tensors of the failed step
        self._runner.recover()
        while launched and self._under_way:  # later steps depend on the results of this one
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
        """End every request. Steps under way are dropped, and their results are not used."""
        forgotten = [step.plan for step in self._under_way]
        self._under_way.clear()
        return self._scheduler.abort_all(forgotten)

    def suspend(self) -> tuple[list[TokenEvent], list[Request]]:
        """Finish the steps under way, and take all requests out, so that a later engine of the model can `resume` them.

        Returns the events of the steps, and the requests that have not ended. All of them must be able to be suspended.
        """
        events: list[TokenEvent] = []
        while self._under_way:
            events += self._collect()
        return events, self._scheduler.suspend()

    def continue_ids(self, earlier: "Engine[TicketT]") -> None:
        """Give later requests other ids than those of an earlier engine. Call this before any request exists; any
        thread may call it.
        """
        self._ids = earlier._ids

    def resume(self, requests: Sequence[Request]) -> list[TokenEvent]:
        """Continue requests that an earlier engine suspended, after `continue_ids`. Returns the ends of those that this
        engine cannot continue.
        """
        fitting = [request for request in requests if max(request.prompt_ids, default=0) < self.vocab_size]
        problem = "The model has been replaced by one with a smaller vocabulary"
        events = [
            TokenEvent(request.id, None, finish=FinishReason.ERROR, error=problem)
            for request in requests
            if request not in fitting
        ]
        return events + self._scheduler.resume(fitting)

    def flush(self, seconds: float = 60.0) -> None:
        """Wait for copies under way, and write dirty blocks to files. No write starts later than `seconds` from now."""
        self._scheduler.flush(seconds)

    def forget(self, token_ids: Sequence[int], origin: Origin = PROGRAM, *, kept: int = 0) -> None:
        """Make the cached blocks of these tokens unfindable on the device, in RAM, and in files.

        The first `kept` tokens stay cached.
        """
        self._check_open()
        self._scheduler.forget(token_ids, origin, kept)

    def adopt(self, index: Sequence[BlockPool]) -> None:
        """Take over the index of the pools of a parked cache. Call this before any request exists."""
        self._scheduler.adopt(index)

    def park(self) -> ParkedCache | None:
        """Close the engine, and return its KV cache for a later load of the same model.

        Returns None if nothing is cached, or if the cache cannot be parked.
        """
        park, self._park = self._park, None
        try:
            self._end_all()
            return None if park is None else self._parked(park)
        finally:
            del park  # it would keep the cache in the memory of the device
            self.close()

    def _parked(self, park: Park) -> ParkedCache | None:
        index, hosts = self._scheduler.device_pools, self._scheduler.host_pools
        if not all(pool.num_free == pool.num_usable for pool in (*index, *hosts)):
            return None
        parked = park(index, hosts)
        return parked if parked.num_bytes else None

    def close(self) -> None:
        """End all requests without events, write dirty blocks to files, stop all threads, and free the memory.

        The wait for files is limited. Afterwards, `add`, `step`, and `forget` raise EngineError. Later calls have no
        effect.
        """
        if self._is_closed:
            return
        self._is_closed, self._park = True, None
        self._end_all()
        with ExitStack() as parts:  # each part is closed even if another one fails
            for close in (trim, self._turn.close, self._runner.close, self._scheduler.close):
                parts.callback(close)

    def _end_all(self) -> None:
        """End all requests without events."""
        try:
            self.abort_all()
        except Exception:  # the engine may have failed in any state; its memory is freed in any case
            log.exception("requests were not ended cleanly before the engine was closed")

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("The engine is closed", "Load the model again.")

    def assert_empty(self) -> None:
        """Raise RuntimeError if a request or a block is still held."""
        self._scheduler.assert_empty()


def _weight(plan: StepPlan) -> int:
    """Return the weight of the most urgent request of a step."""
    return max(WEIGHTS[part.request.origin.service] for part in plan.scheduled)
