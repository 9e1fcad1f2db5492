"""The scheduler: which requests run in the next step, and how many tokens of each. No torch.

Continuous batching under one token budget: running requests catch up first, in order of precedence, then waiting ones
join while budget, seats and KV blocks last. A long prompt takes several steps, smaller ones while others stream; one
whose beginning is cached starts behind that. Several requests of one prompt read it once and share its blocks; so do
the beams of a search, which yield and end together (`engine.searches`).

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

from engine.allowance import Allowance
from engine.config import BLOCK_SIZE, EngineConfig
from engine.cost_model import CostModel
from engine.counters import Counters, EngineState
from engine.errors import PromptTooLong
from engine.kv_groups import blocks_for
from engine.kv_memory import KVMemory, Prefix
from engine.mover import Mover
from engine.precedence import is_urgent, precedence
from engine.request import (
    BeamParams,
    CacheUse,
    FinishReason,
    Request,
    RequestStatus,
    SampledToken,
    ScheduledRequest,
    ServiceClass,
    StepPlan,
    TokenEvent,
)
from engine.searches import Searches, party
from engine.shares import shares
from engine.waiting import WaitingQueue

UNLIMITED = Allowance()


class Scheduler:
    """Owns every request from `add` until the event that carries its finish reason."""

    def __init__(
        self, config: EngineConfig, mover: Mover | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self.costs = CostModel(config)
        self._memory = KVMemory(config, mover, self.costs, self._arrived)
        self._context = min(config.context_length, self._memory.most_tokens)
        self._counters = Counters()
        self._waiting = WaitingQueue()
        self._running: dict[int, Request] = {}
        self._ending: dict[int, Request] = {}  # finished, but part of a step under way
        self._searches = Searches(config, self._memory, self._running, self._counters, self._withdraw)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ending or self._memory.host.transfers)

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
            swapped=sum(request.saved is not None for request in waiting),
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
        if prompt >= self._context:
            raise PromptTooLong(
                f"The prompt has {prompt:,} tokens, and the context holds {self._context:,} including the reply",
                "Shorten the prompt, or raise the context length.",
            )

    def search(self, results: Sequence[Request], beams: BeamParams) -> None:
        """Have requests that `check_fits` let pass be the results of a search, to be given to `add` together. Raises
        InvalidSampling or PromptTooLong where that never fits."""
        self._searches.prepare(results, beams, self._room(results[0]))

    def add(self, *requests: Request) -> None:
        """Queue a request that `check_fits` let pass; further ones share its prompt and are read with it.

        The results of a search are added together, and become what it finds.
        """
        for request in requests:
            request.arrival = self._clock()
        search = requests[0].search
        queued = requests if search is None else (self._searches.begin(search),)
        for request in queued:
            request.block_tables = tuple([] for _ in self._config.groups)
        self._waiting.add(*queued)

    def schedule(self, allowance: Allowance = UNLIMITED) -> StepPlan:
        """The next step. Empty when nothing can be done before a step under way is collected or a copy has ended, or
        nothing is to do."""
        self._memory.host.transfers.poll()
        scheduled: list[ScheduledRequest] = []
        preempted: list[Request] = []
        running = sorted(self._running.values(), key=precedence)
        budget = min(allowance.tokens, self.costs.budget(sum(bool(request.output_ids) for request in running)))
        share = self._shares(running, budget)
        for request in running:
            if len(scheduled) >= allowance.requests:
                break
            if request.status is not RequestStatus.RUNNING or request.is_arriving:
                continue  # it has just yielded to one before it, or is not there yet
            most = min(budget, max(1, share[request.id]))  # who holds blocks must go on, or who waits for them waits on
            if not self._reserve(request, most, preempted):
                break  # it waits for blocks, and nobody behind it takes them first
            budget -= self._take(request, most, scheduled)
        else:
            for newcomer in self._waiting.first_in_line(self._config.max_running):
                if not budget or preempted or len(scheduled) >= allowance.requests or not self._may_sit(newcomer):
                    break
                prefix = self._prefix(newcomer)
                if prefix and self._is_coming(newcomer, prefix):
                    continue  # it joins when that is there to be shared
                if not self._admit(newcomer, prefix, preempted):
                    break
                most = min(budget, max(1, share.get(newcomer.id, budget)))
                budget -= 0 if newcomer.is_arriving else self._take(newcomer, most, scheduled)
        self._memory.host.demote()
        return StepPlan(tuple(scheduled), tuple(preempted))

    def wait(self) -> None:
        """Nothing can be planned and no step is under way: return when a copy may have ended."""
        self._memory.host.transfers.wait()

    def update(self, plan: StepPlan, sampled: Iterable[SampledToken]) -> list[TokenEvent]:
        """Record what a completed step computed and picked. Tokens of requests that ended meanwhile are dropped."""
        for part in plan.scheduled:
            self._collected(part)
        found = {token.request_id: token for token in sampled}
        told = [(part, request) for part in plan.scheduled for request in (part.request, *part.followers)]
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
            for request in (part.request, *part.followers):
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
        while self._memory.host.transfers:
            self._memory.host.transfers.wait()
            self._memory.host.transfers.poll()
        return events

    def assert_empty(self) -> None:
        """Raise RuntimeError when a request or a block is still held."""
        self._memory.check()
        if self.has_work or any(pool.num_free != pool.num_usable for pool in self._memory.pools):
            raise RuntimeError(
                f"{self.num_waiting} waiting, {len(self._running)} running, {len(self._ending)} ending, "
                f"{[(pool.num_free, pool.num_usable) for pool in self._memory.pools]} blocks free and in all"
            )

    # -- joining

    def _prefix(self, request: Request) -> Prefix | None:
        """What is cached of a request; None where more was saved of it."""
        if request.saved is not None and not request.saved.is_lost:
            return None
        return self._memory.look_up(request, _most_cached(request))

    def _is_coming(self, request: Request, prefix: Prefix) -> bool:
        """Whether the block behind a request's cached prefix is being computed by one that goes before it."""
        place = prefix.blocks
        return place < _most_cached(request) and any(
            other.num_published <= place < len(other.block_keys)
            and other.block_keys[place] == request.block_keys[place]
            and other.origin.service <= request.origin.service
            for other in self._running.values()
        )

    def _admit(self, request: Request, prefix: Prefix | None, preempted: list[Request]) -> bool:
        """Give a waiting request a seat and what is cached or saved of it, if its tokens and one more fit what is free.

        Where they do not, those of a lower class yield to it. False where it has to wait.
        """
        while not self._seat(request, prefix):
            if self._memory.host.is_on_its_way(request) or not self._running:
                return False
            last = self._last()
            if last.origin.service <= request.origin.service or not self._yields(last, request):
                return False
            preempted.append(last)
            prefix = self._prefix(request)  # what it had may have been given up for what the other one saved
        return True

    def _may_sit(self, request: Request) -> bool:
        """Whether there is a seat, or one of a lower class has it: else nothing needs to be looked up for it."""
        lower = any(other.origin.service > request.origin.service for other in self._running.values())
        return bool(self._free_seats) or lower

    @property
    def _free_seats(self) -> int:
        return max(0, self._config.max_running - len(self._running) - self._searches.seats_kept)

    def _seat(self, request: Request, prefix: Prefix | None) -> bool:
        if self._free_seats < self._searches.seats(request):
            return False
        stop = self._room(request) if _takes_all(request) else request.num_tokens + 1
        memory = self._memory
        if not (memory.join(request, prefix, stop) if prefix else memory.restore(request, stop)):
            return False
        if not request.num_preemptions:
            request.cache = CacheUse(device=request.num_computed)
            self._counters.prompt_tokens += len(request.prompt_ids)
            self._counters.cached_tokens += request.num_cached
        request.status = RequestStatus.RUNNING
        self._waiting.remove_from_line(request)
        self._running[request.id] = request
        self._searches.mirror(request)
        return True

    def _arrived(self, request: Request, ok: bool) -> None:
        """A request's blocks have come from the host pool; or else it starts again."""
        if not ok:
            self._requeue(request)

    # -- running

    def _shares(self, running: Iterable[Request], budget: int) -> Mapping[int, int]:
        """Tokens of the step for those that run, and for those that may join."""
        wanted = [(request, self._wanted(request)) for request in running]
        joining = [(request, request.num_tokens) for request in self._waiting.first_in_line(self._free_seats)]
        return shares([*wanted, *joining], budget)

    def _wanted(self, request: Request) -> int:
        """Tokens that the request has to catch up on. None once its last token is being sampled."""
        if request.is_leading:
            return 0  # what it holds now is what others are about to share
        # A beam never runs ahead: which of its tokens goes on is known when its whole search has got so far.
        target = request.num_tokens + (request.num_pending if request.beam is None else 0)
        return 0 if target >= self._room(request) else target - request.num_scheduled

    def _reserve(self, request: Request, budget: int, preempted: list[Request]) -> bool:
        """Make sure there are blocks for the request's next tokens; those behind it yield, or else it does itself.

        False when it has yielded, or must wait: who should yield is part of a step under way, or its blocks are.
        """
        count = min(budget, self._wanted(request))
        while count and not self._memory.has_room(request, request.num_scheduled + count):
            if self._memory.will_have_room(request, request.num_scheduled + count):
                return False
            last = self._last()
            if (party(last) is party(request) and self._ending) or not self._yields(last, request):
                return False
            preempted.append(last)
            if party(last) is party(request):
                return False
        return True

    def _last(self) -> Request:
        """Who yields next: the last in order, but never the oldest of the highest class there is."""
        first = min(self._running.values(), key=lambda it: (it.origin.service, it.arrival, it.id))
        others = (it for it in self._running.values() if party(it) is not party(first))
        return max(others, key=precedence, default=first)

    def _take(self, request: Request, budget: int, scheduled: list[ScheduledRequest]) -> int:
        start, known = request.num_scheduled, request.num_tokens
        wanted = self._wanted(request)
        count = self._memory.cut(request, start + min(budget, wanted)) - start
        if not count:
            return 0
        samples = count == wanted
        room = self._room(request)
        has_all = _takes_all(request) and self._memory.has_room(request, room)  # others may have come first
        copies = self._memory.take(request, room if has_all else start + count)
        reported = request.to_report(start, start + count)
        request.num_reported = max(request.num_reported, reported.stop)
        followers = self._seated_followers(request) if samples else ()
        scheduled.append(
            ScheduledRequest(request, start, count, samples, start + count > known, reported, copies, followers)
        )
        request.num_scheduled += count
        request.num_pending += samples
        request.steps_under_way += 1
        return count

    def _seated_followers(self, leader: Request) -> tuple[Request, ...]:
        """Those that pick their first token together with their leader. Who finds no seat joins later by the cache."""
        seated = self._waiting.take_followers(leader, self._free_seats)
        leader.is_leading = bool(seated)
        for follower in seated:
            follower.status = RequestStatus.FOLLOWING
            self._running[follower.id] = follower
        return seated

    def _yields(self, request: Request, to: Request) -> bool:
        """Have a running request give its blocks back, with its whole search, unless that cannot be now, or never for
        this one. A search that has become urgent has all there is, and only ever waits for steps and copies."""
        own, search = party(request) is party(to), request.search
        busy = any(
            it.steps_under_way or it.is_arriving or it.status is not RequestStatus.RUNNING
            for it in (search.requests if search else [request])
        )
        if busy or (is_urgent(request) and (search or not own)) or not (own or precedence(to) < precedence(request)):
            return False
        if search:
            request = self._searches.fold(search)
        blocks = blocks_for(request.num_computed)
        if request.num_computed and self.costs.prefers_swap(blocks) and self._memory.save(request):
            self._counters.swapped_out += 1
        else:
            self._memory.release(request)
            self._counters.recomputed += 1
        request.num_preemptions += 1
        self._requeue(request)
        return True

    def _requeue(self, request: Request) -> None:
        del self._running[request.id]
        request.status = RequestStatus.WAITING
        self._searches.mirror(request)
        self._waiting.add(request)

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
                follower.status, follower.cache = RequestStatus.RUNNING, CacheUse(device=part.stop)
        if request.status is RequestStatus.RUNNING:
            self._memory.publish(request)
        self._let_go(request)

    def _events(self, request: Request, computed: int, found: SampledToken | None) -> list[TokenEvent]:
        """What a step meant for one of its requests: a token, or that a part of the prompt was computed."""
        if request.search is not None:
            return self._searches.told(request, computed, found)
        prompt = () if found is None else found.prompt_logprobs
        if found is None or found.token_id is None:
            return [TokenEvent(request.id, None, num_computed=computed, prompt_logprobs=prompt)]
        request.output_ids.append(found.token_id)
        self._counters.generated_tokens += 1
        finish = self._finish_reason(request, found.token_id)
        if finish is not None:
            self._finish(request)
        return [TokenEvent(request.id, found.token_id, found.logprobs, finish, prompt_logprobs=prompt)]

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.params
        if token_id in params.stop_token_ids or (token_id in request.end_ids and not params.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_tokens >= self._room(request) else None

    def _room(self, request: Request) -> int:
        """The most tokens the request may ever hold."""
        if request.params.max_tokens is None:
            return self._context
        return min(self._context, len(request.prompt_ids) + request.params.max_tokens)

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


def _most_cached(request: Request) -> int:
    """Blocks of a request that need not be computed where they are cached.

    The last token always is: its logits are what the next one is picked from. A prompt to be reported on is computed
    whole, since cached keys and values tell no logits.
    """
    return (request.num_tokens - 1) // BLOCK_SIZE if request.params.prompt_logprobs is None else 0


def _takes_all(request: Request) -> bool:
    """Whether it starts only with all blocks that it can ever need. An urgent search runs alone instead."""
    return is_urgent(request) and request.search is None
