"""The scheduler: decides which requests run in the next step, and with how many tokens each.

Continuous batching under one token budget: running requests come first, in order of priority, then waiting requests
start while budget, slots, and KV blocks last. A long prompt takes several steps, which are smaller while other requests
stream. A request starts after its longest cached prefix. Requests with the same prompt prefill it once and share its
blocks. The beams of a search do the same, and are preempted and ended together (`beam_groups`).

Blocks are allocated as they are needed. When no block is free, the last request in order of priority is preempted: its
blocks are swapped out to the host pools, or dropped and recomputed. The first request is never preempted, so one
request always makes progress. No request is preempted more than MAX_PREEMPTIONS times. A request can also lose its slot
to a request of a higher class.

The next step may be planned while steps are under way. A request's blocks are released, swapped out, or shared only
after every step that includes the request has been collected.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.cost_model import CostModel
from engine.counters import Counters, EngineState
from engine.draft import NO_DRAFT, Draft
from engine.drafting.draft_model import DraftModel
from engine.errors import PromptTooLong
from engine.kv.blocks import BlockPool
from engine.kv.disk.store import DiskStore
from engine.kv.memory import KVMemory
from engine.kv.transfers import BlockTransfer
from engine.request import FinishReason, Origin, Request, RequestStatus, ServiceClass, TokenEvent, TokenSources
from engine.scheduling.admission import Admission, Verdict
from engine.scheduling.beam_groups import BeamGroups
from engine.scheduling.preemption import Preemption
from engine.scheduling.priority import priority_key, split_token_budget
from engine.scheduling.running_set import RunningSet
from engine.scheduling.verification import Verification
from engine.step import UNLIMITED, SampledToken, ScheduledRequest, StepLimits, StepPlan

log = logging.getLogger(__name__)

NO_LIMITS = StepLimits()
MIN_REPORTED_ROWS = 16  # prompt positions that a step can report with any number of running requests
FLUSH_SECONDS = 1.0  # time limit for writing dirty blocks when all requests are aborted
HANGING_SECONDS = 10.0  # seconds that a flush then waits for a copy under way, which may be to a disk that hangs


class Scheduler:
    """Owns every request from `add` until the event with its finish reason."""

    def __init__(
        self,
        config: EngineConfig,
        block_transfer: BlockTransfer | None = None,
        store: DiskStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self.costs = CostModel(config)
        self._counters = Counters()
        self._memory = KVMemory(config, block_transfer, store, self.costs, self._counters, clock)
        self._requests = RunningSet(config.max_running, self._memory, self._counters, clock)
        self._groups = BeamGroups(config, self._requests, self._memory, self._counters)
        self._preemption = Preemption(self._requests, self._groups, self._memory)
        self._admission = Admission(self._requests, self._preemption, self._memory)
        self._verification = Verification(config, self._requests, self._memory, self.costs, self._counters)
        self._num_steps = 0  # number of steps planned so far

    @property
    def has_work(self) -> bool:
        return self.has_requests or self._memory.is_busy

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def progress(self) -> int:
        """Number of steps planned and copies completed so far."""
        return self._num_steps + self._memory.transfers.num_ended

    @property
    def num_waiting(self) -> int:
        return len(self._requests.waiting)

    @property
    def num_running(self) -> int:
        return len(self._requests.running)

    def state(self) -> EngineState:
        waiting = list(self._requests.waiting)
        pool, hosts = self._memory.groups[0].pool, self._memory.host.pools
        return EngineState(
            running=len(self._requests.running),
            waiting=tuple(sum(it.origin.service is service for it in waiting) for service in ServiceClass),
            swapped=sum(map(self._memory.is_swapped_out, waiting)),
            kv_blocks=pool.num_usable,
            kv_blocks_held=pool.num_usable - pool.num_free,
            kv_blocks_cached=pool.num_cached,
            host_blocks=hosts[0].num_usable if hosts else 0,
            host_blocks_used=hosts[0].num_usable - hosts[0].num_free + hosts[0].num_cached if hosts else 0,
            counters=replace(self._counters),
            decode_seconds=self.costs.steps.decode,
        )

    def validate_request(self, request: Request) -> None:
        """Raise PromptTooLong, with the numbers, if the request could not run even alone."""
        prompt = len(request.prompt_ids)
        if not prompt:
            raise PromptTooLong("The prompt is empty", "Send at least one token.")
        if prompt >= self._memory.context:
            raise PromptTooLong.of(prompt, self._memory.context, self._config.longest_context)

    def validate_beam_search(self, result: Request) -> None:
        """Raise InvalidSampling or PromptTooLong if the beam search of this result can never fit into memory."""
        if result.params.beams is not None:
            self._groups.max_tokens(result, result.params.beams)

    def draft_with(self, model: DraftModel) -> None:
        """Let a small model draft tokens where this is faster. Requires `config.drafts`."""
        if self._verification.drafter is None:
            raise ValueError("this engine verifies no drafts")
        self._verification.drafter.draft_with(model)

    def add(self, *requests: Request) -> None:
        """Queue a request that passed `validate_request`, and others with the same prompt. The prompt is prefilled
        once.

        The results of a beam search are added together, after `validate_beam_search`.
        """
        for request in requests:
            request.queue.arrival = self._clock()
        beams = requests[0].params.beams
        self._requests.waiting.add(*(requests if beams is None else (self._groups.start(requests, beams),)))

    def schedule(self, limits: StepLimits = NO_LIMITS, other_streams: int = 0) -> StepPlan:
        """Plan the next step. `other_streams` requests of other engines wait until it ends.

        The plan is empty if there is nothing to compute, or if nothing can be computed before a step under way is
        collected or a copy ends.
        """
        self._resume_arrived()
        scheduled: list[ScheduledRequest] = []
        preempted: list[Request] = []
        running = sorted(self._requests.running.values(), key=priority_key)
        streams = sum(bool(request.output_ids) for request in running)
        budget = min(limits.tokens, self.costs.token_budget(streams, other_streams))
        missing = [(request, self._num_missing(request)) for request in running]
        share = self._token_shares(missing, budget)
        drafts = self._verification.choose(missing, budget)
        for request in running:
            if len(scheduled) >= limits.requests:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # an earlier request just preempted it, or its blocks have not arrived yet
            # Always at least 1 token: a request that holds blocks could otherwise stall the requests that wait for
            # them.
            most = min(budget, max(1, share[request.id]))
            if not self._reserve(request, most, preempted):
                break  # the request waits for blocks, and later requests must not take them
            budget -= self._schedule(request, most, scheduled, drafts.get(request.id, NO_DRAFT))
        else:
            self._admit(budget, limits.requests, share, scheduled, preempted)
        self._memory.host.demote()
        self._memory.disk.write_back(at_once=not self.has_requests)
        self._num_steps += bool(scheduled)
        return StepPlan(tuple(scheduled), tuple(preempted))

    def _admit(
        self,
        budget: int,
        most_requests: int,
        share: Mapping[int, int],
        scheduled: list[ScheduledRequest],
        preempted: list[Request],
    ) -> None:
        """Start waiting requests while budget, slots, and blocks last, and schedule their first tokens."""
        for newcomer in self._requests.waiting.head(self._config.max_running):
            if not budget or preempted or len(scheduled) >= most_requests:
                return
            verdict = self._admission.admit(newcomer, preempted)
            if verdict is Verdict.BLOCKED:
                return
            if verdict is Verdict.STARTED and newcomer.status is RequestStatus.RUNNING:
                self._count_prompt(newcomer)
                budget -= self._schedule(newcomer, min(budget, max(1, share.get(newcomer.id, budget))), scheduled)

    def wait(self) -> None:
        """Block until a copy may have ended. Call this only with nothing to plan and no step under way."""
        if self.has_requests:
            self._memory.transfers.wait()

    def flush(self, seconds: float) -> None:
        """Wait for copies under way, and write dirty blocks to files. No write starts later than `seconds` from now.

        A copy that has not ended HANGING_SECONDS later is left under way.
        """
        until = self._clock() + seconds
        while self._memory.transfers or (self._memory.disk.has_dirty and self._clock() < until):
            if self._clock() >= until + HANGING_SECONDS:
                log.warning("blocks are still being copied after %.0f s", seconds + HANGING_SECONDS)
                return
            self._memory.transfers.wait(HANGING_SECONDS)
            self._resume_arrived()
            if self._clock() < until:
                self._memory.disk.write_back(at_once=True)

    def forget(self, token_ids: Sequence[int], origin: Origin, kept: int) -> None:
        """See `KVMemory.forget`. The replies with the same cache salt are no longer used for drafts."""
        self._memory.forget(token_ids, origin, kept)
        self._verification.forget(token_ids, origin, kept)

    def update(self, plan: StepPlan, sampled: Iterable[SampledToken]) -> list[TokenEvent]:
        """Record the results of a completed step, and return the events. Tokens of requests that have ended are
        dropped.
        """
        for part in plan.scheduled:
            self._finish_part(part)
        found: dict[int, list[SampledToken]] = {}
        for token in sampled:
            found.setdefault(token.request_id, []).append(token)
        sampling = [(part, request) for part in plan.scheduled for request in part.sampling_requests]
        for _, request in sampling:  # all requests are started first, so that grammar processes work in parallel
            token_ids = [it.token_id for it in found.get(request.id, ()) if it.token_id is not None]
            if request.constraint is not None and token_ids:
                request.constraint.prefetch_accept(token_ids)
        events = []
        for part, request in sampling:
            for result in found.get(request.id) or (None,):
                if request.id in self._requests.running:
                    events += self._extend(request, part.stop, result)
            if part.drafted:
                self._verification.finish(part)
        return events

    def fail(self, plan: StepPlan, error: str) -> list[TokenEvent]:
        """End the requests of a failed step with `error`, and return the events. The results of the step are not
        used.
        """
        events: list[TokenEvent] = []
        self._counters.failed_steps += 1
        for part in plan.scheduled:
            self._memory.release_sources(part.copies)
            for request in part.sampling_requests:
                if request.id in self._requests.running:
                    events += self._end(request, FinishReason.ERROR, error)
            self._requests.collect(part)
        return events

    def undo(self, plan: StepPlan) -> None:
        """Undo a step that was not executed. Later steps must have been undone first."""
        for part in reversed(plan.scheduled):
            request = part.request
            request.num_scheduled = part.start
            if part.logprob_positions:
                request.num_prompt_logprobs = part.logprob_positions.start
            self._memory.undo(request, part.copies)
            self._requests.undo_followers(request, part.followers)
            self._requests.collect(part)

    def abort(self, request_id: int) -> list[TokenEvent]:
        """End a request in any state, and return the events. The list is empty if no such request exists.

        Aborting a result of a beam search ends the whole group.
        """
        if group := self._requests.group_of_result(request_id):
            return self._groups.end(group, FinishReason.ABORT)
        request = self._requests.running.get(request_id) or self._requests.waiting.remove(request_id)
        return [] if request is None else self._end(request, FinishReason.ABORT)

    def abort_all(self, forgotten: Iterable[StepPlan] = ()) -> list[TokenEvent]:
        """End every request, wait for copies under way, and return the events. Steps in `forgotten` will not be
        collected.
        """
        events: list[TokenEvent] = []
        for plan in forgotten:
            for part in plan.scheduled:
                self._memory.release_sources(part.copies)
        self._requests.forget_parts()
        for request in (*self._requests.running.values(), *self._requests.waiting):
            # ending an earlier beam of the same group has already finished this request
            if request.status is not RequestStatus.FINISHED:
                events += self._end(request, FinishReason.ABORT)
        self.flush(FLUSH_SECONDS)
        return events

    def suspend(self) -> list[Request]:
        """Take all requests out, so that another scheduler can `resume` them. No step may be under way.

        Their full blocks stay cached. The requests are in order of priority.
        """
        requests = [*self._requests.running.values(), *self._requests.waiting]
        for request in requests:
            self._memory.release(request)
            self._requests.withdraw(request)
        self.flush(FLUSH_SECONDS)
        return sorted(requests, key=priority_key)

    def resume(self, requests: Iterable[Request]) -> list[TokenEvent]:
        """Queue requests that another scheduler of the same model suspended. Returns the ends of those for which the
        context is too short now.
        """
        events: list[TokenEvent] = []
        for request in requests:
            self._requests.waiting.add(request)
            if request.num_tokens >= self._memory.max_tokens(request):
                events += self._end(request, FinishReason.LENGTH)
        return events

    @property
    def device_pools(self) -> tuple[BlockPool, ...]:
        """The index of the device pools, one per group."""
        return tuple(group.pool for group in self._memory.groups)

    @property
    def host_pools(self) -> Sequence[BlockPool]:
        """The index of the host pools, one per group, or none."""
        return self._memory.host.pools

    def adopt(self, index: Sequence[BlockPool]) -> None:
        """See `KVMemory.adopt`."""
        self._memory.adopt(index)

    def close(self) -> None:
        """Stop the copies, and close the draft model. No request may be added afterwards."""
        self._memory.close()
        if self._verification.drafter is not None:
            self._verification.drafter.close()

    def assert_empty(self) -> None:
        """Raise RuntimeError if a request or a block is still held."""
        self._memory.check_pools()
        if self.has_work or not self._memory.is_empty:
            raise RuntimeError(
                f"{self.num_waiting} waiting, {self.num_running} running, {len(self._requests.ending)} ending, "
                f"(free, usable) blocks per pool: {[(pool.num_free, pool.num_usable) for pool in self._memory.pools]}"
            )

    def _resume_arrived(self) -> None:
        """Run the requests whose blocks have arrived on the device; requeue those whose copies failed."""
        for arrived in self._memory.poll():
            if arrived.ok:
                self._requests.set_status(arrived.request, RequestStatus.RUNNING)
                self._count_prompt(arrived.request)
            else:
                self._requests.requeue(arrived.request)

    def _count_prompt(self, request: Request) -> None:
        """Count the sources of a request's prompt tokens, once, when the request first starts."""
        if not request.is_restarted:
            self._counters.prompt_tokens += len(request.prompt_ids)
            self._counters.prompts += request.cache

    # -- planning

    def _token_shares(self, missing: Iterable[tuple[Request, int]], budget: int) -> Mapping[int, int]:
        """Return request id -> share of the token budget, for running requests with their numbers of missing tokens,
        and for waiting requests that may start.
        """
        newcomers = self._requests.waiting.head(self._requests.free_slots)
        return split_token_budget([*missing, *((request, request.num_tokens) for request in newcomers)], budget)

    def _num_missing(self, request: Request) -> int:
        """Return the number of known tokens that no step has computed or is computing.

        The result is 0 if the request needs its last token, which is still being sampled, or waits for it to verify a
        draft.
        """
        if request.status is RequestStatus.LEADING:
            return 0  # the request's followers are about to share its blocks, which must not change
        target, parts = request.num_tokens, self._requests.parts_of(request)
        if parts and request.runs_ahead and not self._verification.waits(request):
            target += sum(part.samples for part in parts)
        # More tokens than known are scheduled while drafted ones are verified.
        return 0 if target >= self._memory.max_tokens(request) else max(0, target - request.num_scheduled)

    def _reserve(self, request: Request, budget: int, preempted: list[Request]) -> bool:
        """Free blocks for the request's next tokens by preempting later requests, or the request itself if it is last.

        Returns False if the request was preempted, or must wait for a step under way: one of the victim's, or one that
        holds the request's blocks.
        """
        count = min(budget, self._num_missing(request))
        while count and not self._memory.can_allocate(request, request.num_scheduled + count):
            if self._memory.can_allocate_later(request, request.num_scheduled + count):
                return False
            victim = self._preemption.pick_victim()
            own = self._requests.same_group(victim, request)
            if (own and self._requests.ending) or not self._preemption.preempt(victim, request):
                return False
            preempted.append(victim)
            if own:
                return False
        return True

    def _num_reportable(self, request: Request, scheduled: Sequence[ScheduledRequest]) -> int:
        """Return the number of a request's next tokens whose log-probabilities the step has logit rows to report."""
        if not self._config.max_logit_rows or request.params.prompt_logprobs is None:
            return UNLIMITED
        # Each running request may need a row to sample from.
        rows = max(MIN_REPORTED_ROWS, self._config.max_logit_rows - len(self._requests.running))
        left = max(0, rows - sum(len(part.logprob_positions) for part in scheduled))
        first = max(request.num_scheduled, request.num_prompt_logprobs)
        if len(request.prompt_ids) - 1 <= first + left:
            return UNLIMITED
        return first + left - request.num_scheduled

    def _schedule(
        self, request: Request, budget: int, scheduled: list[ScheduledRequest], draft: Draft = NO_DRAFT
    ) -> int:
        """Add at most `budget` of a request's next tokens to the step, and the draft of a request that decodes.

        Returns the number of tokens added.
        """
        start, known = request.num_scheduled, request.num_tokens
        missing = self._num_missing(request)
        most = min(budget, missing, self._num_reportable(request, scheduled))
        count = self._memory.limit_step(request, start + most) - start
        if not count:
            return 0
        samples = count == missing
        draft = self._verification.fitting(request, start + count, draft) if samples else NO_DRAFT
        count += len(draft.token_ids)
        room = self._memory.max_tokens(request)
        # Check again, because requests that were admitted earlier may have taken blocks.
        has_all = self._admission.takes_all_blocks(request) and self._memory.can_allocate(request, room)
        copies = self._memory.allocate(request, room if has_all else start + count)
        positions = request.logprob_positions(start, start + count)
        request.num_prompt_logprobs = max(request.num_prompt_logprobs, positions.stop)
        part = ScheduledRequest(
            request,
            start,
            count,
            samples,
            block_tables=self._memory.blocks_of(request).tables,
            needs_pending_token=not draft.token_ids and start + count > known,
            logprob_positions=positions,
            copies=copies,
            followers=self._requests.start_followers(request) if samples else (),
            draft=draft,
        )
        request.num_scheduled += count
        self._requests.launch(part)
        scheduled.append(part)
        return count

    # -- after a step

    def _extend(self, request: Request, computed: int, found: SampledToken | None) -> list[TokenEvent]:
        """Return the events that a step's result causes for one of its requests, or for the request's beam group."""
        if group := self._requests.group_of(request):
            return self._groups.update(group, request, computed, found)
        return self._requests.extend(request, computed, found)

    def _end(self, request: Request, finish: FinishReason, error: str = "") -> list[TokenEvent]:
        """End a request in any state, with its whole beam group if it computes a beam, and return the events."""
        if group := self._requests.group_of(request):
            return self._groups.end(group, finish, error)
        return self._requests.end(request, finish, error)

    def _finish_part(self, part: ScheduledRequest) -> None:
        request = part.request
        self._counters.computed_tokens += part.num_known
        if part.drafted:
            return  # the accepted tokens are not known yet
        request.num_computed = part.stop
        self._memory.release_sources(part.copies)
        if part.followers and request.status is RequestStatus.LEADING:
            request.status = RequestStatus.RUNNING
        for follower in part.followers:
            if follower.id in self._requests.running:
                self._memory.fork(request, follower, part.stop)
                follower.status, follower.cache = RequestStatus.RUNNING, TokenSources(device=part.stop)
        if request.status is not RequestStatus.FINISHED:
            self._memory.publish(request)
        self._requests.collect(part)
