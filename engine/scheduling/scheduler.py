"""The scheduler: which requests run in the next step, and how many tokens of each. No torch.

Continuous batching under one token budget: running requests catch up first, in order of precedence, then waiting ones
join while budget, seats and KV blocks last. A long prompt takes several steps, smaller ones while others stream; one
whose beginning is cached starts behind that. Several requests of one prompt read it once and share its blocks; so do
the beams of a search, which yield and end together (`engine.scheduling.beam_groups`).

Blocks are taken as they are needed. When none is free the last in order yields: its blocks are copied to the host pool,
or given up and computed again where they are reused meanwhile. The first in order never yields to anyone, so there is
always one that proceeds; and nobody yields more than MOST_PREEMPTIONS times. A request may also yield its place to one
of a higher class.

Steps may be under way while the next is planned. Blocks and counters of a request change hands only when every step
that it is part of has been collected. Refuses to know what a token means and where keys and values lie.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.cost_model import CostModel
from engine.counters import Counters, EngineState
from engine.errors import PromptTooLong
from engine.kv.disk.store import DiskStore
from engine.kv.memory import KVMemory
from engine.kv.mover import Mover
from engine.request import FinishReason, Origin, Request, RequestStatus, ServiceClass, TokenEvent, TokenLogprobs
from engine.sampling_params import BeamParams
from engine.scheduling.admission import Admission, Verdict, takes_all
from engine.scheduling.beam_groups import Searches, party
from engine.scheduling.preemption import Yielding
from engine.scheduling.priority import WaitingQueue, precedence
from engine.scheduling.step_budget import Allowance, shares
from engine.step import SampledToken, ScheduledRequest, StepPlan
from engine.token_sources import TokenSources

UNLIMITED = Allowance()
SETTLE_SECONDS = 1.0  # at the end, for what is due to be written


class Scheduler:
    """Owns every request from `add` until the event that carries its finish reason."""

    def __init__(
        self,
        config: EngineConfig,
        mover: Mover | None = None,
        store: DiskStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self.costs = CostModel(config)
        self._counters = Counters()
        self._memory = KVMemory(config, mover, store, self.costs, self._counters, clock)
        self._waiting = WaitingQueue()
        self._running: dict[int, Request] = {}
        self._ending: dict[int, Request] = {}  # finished, but part of a step under way
        self._num_steps = 0  # that were planned
        self._searches = Searches(config, self._memory, self._running, self._counters, self._withdraw)
        self._yielding = Yielding(
            self._memory, self._waiting, self._running, self._searches, self.costs, self._counters
        )
        self._admission = Admission(
            config, self._memory, self._waiting, self._running, self._searches, self._yielding, self._counters, clock
        )

    @property
    def has_work(self) -> bool:
        return self.has_requests or self._memory.is_busy

    @property
    def has_requests(self) -> bool:
        """Whether somebody waits for something."""
        return bool(self._waiting or self._running or self._ending)

    @property
    def progress(self) -> int:
        """Grows with each step that is planned and each copy that ends."""
        return self._num_steps + self._memory.transfers.num_ended

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        return self._memory.groups[0].pool.num_free

    def state(self) -> EngineState:
        waiting = list(self._waiting)
        pool, hosts = self._memory.groups[0].pool, self._memory.host.pools
        return EngineState(
            running=len(self._running),
            waiting=tuple(sum(it.origin.service is service for it in waiting) for service in ServiceClass),
            swapped=sum(map(self._memory.is_swapped_out, waiting)),
            kv_blocks=pool.num_usable,
            kv_blocks_held=pool.num_usable - pool.num_free,
            kv_blocks_cached=pool.num_cached,
            host_blocks=hosts[0].num_usable if hosts else 0,
            host_blocks_used=hosts[0].num_usable - hosts[0].num_free + hosts[0].num_cached if hosts else 0,
            counters=replace(self._counters),
        )

    def check_fits(self, request: Request) -> None:
        """Raise PromptTooLong, with the numbers, for a request that cannot run even alone."""
        prompt = len(request.prompt_ids)
        if not prompt:
            raise PromptTooLong("The prompt is empty", "Send at least one token.")
        if prompt >= self._memory.context:
            raise PromptTooLong.of(prompt, self._memory.context, self._config.longest_context)

    def search(self, results: Sequence[Request], beams: BeamParams) -> None:
        """Have requests that `check_fits` let pass be the results of a search, to be given to `add` together. Raises
        InvalidSampling or PromptTooLong where that never fits."""
        self._searches.prepare(results, beams, self._memory.room(results[0]))

    def add(self, *requests: Request) -> None:
        """Queue a request that `check_fits` let pass; further ones share its prompt and are read with it.

        The results of a search are added together, and become what it finds.
        """
        for request in requests:
            request.arrival = self._clock()
        search = requests[0].search
        self._waiting.add(*(requests if search is None else (self._searches.begin(search),)))

    def schedule(self, allowance: Allowance = UNLIMITED) -> StepPlan:
        """The next step. Empty when nothing can be done before a step under way is collected or a copy has ended, or
        nothing is to do."""
        self._resume_arrived()
        scheduled: list[ScheduledRequest] = []
        preempted: list[Request] = []
        running = sorted(self._running.values(), key=precedence)
        budget = min(allowance.tokens, self.costs.budget(sum(bool(request.output_ids) for request in running)))
        share = self._shares(running, budget)
        for request in running:
            if len(scheduled) >= allowance.requests:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # it has just yielded to one before it, or is not there yet
            most = min(budget, max(1, share[request.id]))  # who holds blocks must go on, or who waits for them waits on
            if not self._reserve(request, most, preempted):
                break  # it waits for blocks, and nobody behind it takes them first
            budget -= self._take(request, most, scheduled)
        else:
            for newcomer in self._waiting.first_in_line(self._config.max_running):
                if not budget or preempted or len(scheduled) >= allowance.requests:
                    break
                verdict = self._admission.admit(newcomer, preempted)
                if verdict is Verdict.WAITS:
                    break
                if verdict is Verdict.SEATED and newcomer.status is RequestStatus.RUNNING:
                    budget -= self._take(newcomer, min(budget, max(1, share.get(newcomer.id, budget))), scheduled)
        self._memory.host.demote()
        self._memory.disk.write_some(at_once=not self.has_requests)
        self._num_steps += bool(scheduled)
        return StepPlan(tuple(scheduled), tuple(preempted))

    def wait(self) -> None:
        """Nothing can be planned and no step is under way: return when a copy may have ended, if somebody waits."""
        if self.has_requests:
            self._memory.transfers.wait()

    def settle(self, seconds: float) -> None:
        """Wait for the copies under way, and have what is due written, as far as that begins within some seconds."""
        until = self._clock() + seconds
        while self._memory.transfers or (self._memory.disk.has_due and self._clock() < until):
            self._memory.transfers.wait()
            self._resume_arrived()
            if self._clock() < until:
                self._memory.disk.write_some(at_once=True)

    def forget(self, token_ids: Sequence[int], origin: Origin, kept: int) -> None:
        """See `KVMemory.forget`."""
        self._memory.forget(token_ids, origin, kept)

    def update(self, plan: StepPlan, sampled: Iterable[SampledToken]) -> list[TokenEvent]:
        """Record what a completed step computed and picked. Tokens of requests that ended meanwhile are dropped."""
        for part in plan.scheduled:
            self._collected(part)
        found = {token.request_id: token for token in sampled}
        told = [(part, request) for part in plan.scheduled for request in part.picking]
        for _, request in told:  # so that constraints that other processes follow are followed at the same time
            token = found.get(request.id)
            if request.constraint is not None and token is not None and token.token_id is not None:
                request.constraint.tell(token.token_id)
        return [
            event
            for part, request in told
            if request.id in self._running
            for event in self._events(request, part.stop, found.get(request.id))
        ]

    def fail(self, plan: StepPlan, error: str) -> list[TokenEvent]:
        """A step failed: the requests it ran end with `error`, and what it computed is not used."""
        events: list[TokenEvent] = []
        self._counters.failed_steps += 1
        for part in plan.scheduled:
            part.request.steps_under_way -= 1
            self._memory.collected(part.copies)
            for request in part.picking:
                events += self._end(request, FinishReason.ERROR, error) if request.id in self._running else []
            self._let_go(part.request)
        return events

    def undo(self, plan: StepPlan) -> None:
        """A step has not happened, nor any behind it: its requests are where they were before."""
        for part in reversed(plan.scheduled):
            request = part.request
            request.steps_under_way -= 1
            request.num_pending -= part.samples
            request.num_scheduled = part.start
            request.num_reported = part.reported.start if part.reported else request.num_reported
            request.is_leading = False
            self._memory.undo(request, part.copies)
            followers = [self._running.pop(it.id) for it in part.followers if it.id in self._running]
            for follower in followers:
                follower.status = RequestStatus.WAITING
            if request.status is RequestStatus.FINISHED and followers:
                self._waiting.add(*followers)
            else:
                self._waiting.follow(request, followers)
            self._let_go(request)

    def abort(self, request_id: int) -> list[TokenEvent]:
        """End a request in any state, with its whole search where it is a result of one. Nothing when there is no such
        request any more."""
        if search := self._searches.of_result(request_id):
            return self._searches.end(search, FinishReason.ABORT)
        request = self._running.get(request_id) or self._waiting.remove(request_id)
        return [] if request is None else self._end(request, FinishReason.ABORT)

    def abort_all(self, forgotten: Iterable[StepPlan] = ()) -> list[TokenEvent]:
        """End every request. Steps under way, `forgotten`, will not be collected; copies are waited for."""
        events: list[TokenEvent] = []
        for plan in forgotten:
            for part in plan.scheduled:
                self._memory.collected(part.copies)
        for request in (*self._running.values(), *self._ending.values()):
            request.steps_under_way = 0
        for request in (*self._running.values(), *self._waiting):
            events += self._end(request, FinishReason.ABORT)
        for request in list(self._ending.values()):
            self._let_go(request)
        self.settle(SETTLE_SECONDS)
        return events

    def assert_empty(self) -> None:
        """Raise RuntimeError when a request or a block is still held."""
        self._memory.check()
        if self.has_work or not self._memory.is_empty:
            raise RuntimeError(
                f"{self.num_waiting} waiting, {len(self._running)} running, {len(self._ending)} ending, "
                f"{[(pool.num_free, pool.num_usable) for pool in self._memory.pools]} blocks free and in all"
            )

    def _resume_arrived(self) -> None:
        """Run the requests whose blocks have been copied to the device; requeue those whose copies have failed."""
        for arrived in self._memory.poll():
            if arrived.ok:
                self._admission.start(arrived.request)
            else:
                self._yielding.requeue(arrived.request)

    # -- running

    def _shares(self, running: Iterable[Request], budget: int) -> Mapping[int, int]:
        """Tokens of the step for those that run, and for those that may join."""
        wanted = [(request, self._wanted(request)) for request in running]
        joining = [(request, request.num_tokens) for request in self._waiting.first_in_line(self._admission.free_seats)]
        return shares([*wanted, *joining], budget)

    def _wanted(self, request: Request) -> int:
        """Tokens that the request has to catch up on. None once its last token is being sampled."""
        if request.is_leading:
            return 0  # what it holds now is what others are about to share
        target = request.num_tokens + (request.num_pending if request.runs_ahead else 0)
        return 0 if target >= self._memory.room(request) else target - request.num_scheduled

    def _reserve(self, request: Request, budget: int, preempted: list[Request]) -> bool:
        """Make sure there are blocks for the request's next tokens; those behind it yield, or else it does itself.

        False when it has yielded, or must wait: who should yield is part of a step under way, or its blocks are.
        """
        count = min(budget, self._wanted(request))
        while count and not self._memory.has_room(request, request.num_scheduled + count):
            if self._memory.will_have_room(request, request.num_scheduled + count):
                return False
            last = self._yielding.last()
            if (party(last) is party(request) and self._ending) or not self._yielding.yields(last, request):
                return False
            preempted.append(last)
            if party(last) is party(request):
                return False
        return True

    def _take(self, request: Request, budget: int, scheduled: list[ScheduledRequest]) -> int:
        start, known = request.num_scheduled, request.num_tokens
        wanted = self._wanted(request)
        count = self._memory.cut(request, start + min(budget, wanted)) - start
        if not count:
            return 0
        samples = count == wanted
        room = self._memory.room(request)
        has_all = takes_all(request) and self._memory.has_room(request, room)  # others may have come first
        copies = self._memory.take(request, room if has_all else start + count)
        reported = request.to_report(start, start + count)
        request.num_reported = max(request.num_reported, reported.stop)
        followers = self._seated_followers(request) if samples else ()
        scheduled.append(
            ScheduledRequest(
                request,
                start,
                count,
                samples,
                block_tables=self._memory.blocks_of(request).tables,
                feeds=start + count > known,
                reported=reported,
                copies=copies,
                followers=followers,
            )
        )
        request.num_scheduled += count
        request.num_pending += samples
        request.steps_under_way += 1
        return count

    def _seated_followers(self, leader: Request) -> tuple[Request, ...]:
        """Those that pick their first token together with their leader. Who finds no seat joins later by the cache."""
        seated = self._waiting.take_followers(leader, self._admission.free_seats)
        leader.is_leading = bool(seated)
        for follower in seated:
            follower.status = RequestStatus.FOLLOWING
            self._running[follower.id] = follower
        return seated

    # -- after a step

    def _collected(self, part: ScheduledRequest) -> None:
        request = part.request
        request.steps_under_way -= 1
        request.num_pending -= part.samples
        request.num_computed = part.stop
        self._counters.computed_tokens += part.num_tokens
        self._memory.collected(part.copies)
        for follower in part.followers:
            request.is_leading = False
            if follower.id in self._running:
                self._memory.fork(request, follower, part.stop)
                follower.status, follower.cache = RequestStatus.RUNNING, TokenSources(device=part.stop)
        if request.status is RequestStatus.RUNNING:
            self._memory.publish(request)
        self._let_go(request)

    def _events(self, request: Request, computed: int, found: SampledToken | None) -> list[TokenEvent]:
        """What a step meant for one of its requests: a token, or that a part of the prompt was computed."""
        if request.search is not None:
            return self._searches.told(request, computed, found)
        prompt = () if found is None else found.prompt_logprobs
        if found is None or (found.token_id is None and not found.problem):
            return [TokenEvent(request.id, None, num_computed=computed, prompt_logprobs=prompt)]
        if found.token_id is None:
            return self._end(request, found.reason, found.problem)
        followed = request.constraint.accept(found.token_id) if request.constraint is not None else ()
        events = [self._token(request, found.token_id, found.logprobs, prompt, last=not followed)]
        for number, token_id in enumerate(followed, 1):
            if events[-1].finish is None:
                events.append(self._token(request, token_id, last=number == len(followed)))
        return events

    def _token(
        self,
        request: Request,
        token_id: int,
        logprobs: TokenLogprobs | None = None,
        prompt: tuple[TokenLogprobs, ...] = (),
        *,
        last: bool,
    ) -> TokenEvent:
        """The reply goes on with a token, the `last` of those that its constraint knows of."""
        request.output_ids.append(token_id)
        self._counters.generated_tokens += 1
        finish = self._finish_reason(request, token_id, last=last)
        if finish is not None:
            self._finish(request)
        return TokenEvent(request.id, token_id, logprobs, finish, prompt_logprobs=prompt)

    def _finish_reason(self, request: Request, token_id: int, *, last: bool) -> FinishReason | None:
        params = request.params
        if last and request.constraint is not None and request.constraint.ended:
            return FinishReason.STOP
        if token_id in params.stop_token_ids or (token_id in request.end_ids and not params.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_tokens >= self._memory.room(request) else None

    def _end(self, request: Request, finish: FinishReason, error: str = "") -> list[TokenEvent]:
        if request.search is not None:
            return self._searches.end(request.search, finish, error)
        self._withdraw(request)
        return [TokenEvent(request.id, None, finish=finish, error=error)]

    def _withdraw(self, request: Request) -> None:
        if request.id not in self._running:
            self._waiting.remove(request.id)
        self._finish(request)

    def _finish(self, request: Request) -> None:
        if self._running.pop(request.id, None):
            self._ending[request.id] = request
            self._waiting.leave_followers(request)
        request.status = RequestStatus.FINISHED
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Free a finished request's blocks once no step under way can write to them."""
        if request.status is RequestStatus.FINISHED and not request.steps_under_way:
            self._ending.pop(request.id, None)
            self._memory.release(request)
