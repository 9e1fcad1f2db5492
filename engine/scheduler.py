"""The scheduler: which requests run in the next step, and how many tokens of each. No torch.

Continuous batching under one token budget: running requests catch up first, oldest first, then waiting ones join while
budget, seats and KV blocks last. A long prompt takes several steps; one whose beginning is cached starts behind that.
Blocks are taken as they are needed. When none is free the youngest running request yields: its blocks go back, and it
computes again later what of them was reused meanwhile. The oldest never yields, so there is always one that proceeds.

Steps may be under way while the next is planned. Blocks and counters of a request change hands only when every step
that it is part of has been collected. Refuses to know what a token means and where keys and values lie.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from engine.blocks import BlockKey, BlockPool, block_key, root_key
from engine.config import BLOCK_SIZE, EngineConfig
from engine.counters import Counters, EngineState
from engine.errors import PromptTooLong
from engine.request import (
    FinishReason,
    Request,
    RequestStatus,
    SampledToken,
    ScheduledRequest,
    ServiceClass,
    StepPlan,
    TokenEvent,
)


class Scheduler:
    """Owns every request from `add` until the event that carries its finish reason."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._blocks = BlockPool(config.num_blocks)
        self._counters = Counters()
        self._context = min(config.context_length, self._blocks.num_usable * BLOCK_SIZE)
        self._waiting: deque[Request] = deque()  # oldest first
        self._running: dict[int, Request] = {}  # oldest first
        self._ending: dict[int, Request] = {}  # finished, but part of a step under way

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ending)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    def state(self) -> EngineState:
        waiting = [request.origin.service for request in list(self._waiting)]
        held = self._blocks.num_usable - self._blocks.num_free
        return EngineState(
            running=len(self._running),
            waiting=tuple(waiting.count(service) for service in ServiceClass),
            swapped=0,
            kv_blocks=self._blocks.num_usable,
            kv_blocks_held=held,
            kv_blocks_cached=max(0, self._blocks.num_findable - held),
            host_blocks=0,
            host_blocks_used=0,
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

    def add(self, request: Request) -> None:
        """Queue a request that `check_fits` let pass."""
        self._waiting.append(request)

    def schedule(self) -> StepPlan:
        """The next step. Empty when nothing can be done before a step under way is collected, or nothing is to do."""
        budget = self._config.max_step_tokens
        scheduled: list[ScheduledRequest] = []
        preempted: list[Request] = []
        for request in list(self._running.values()):
            if request.status is not RequestStatus.RUNNING:
                continue  # it has just given way to an older one
            if not self._reserve(request, budget, preempted):
                break  # it waits for blocks, and no younger one takes them first
            budget -= self._take(request, budget, scheduled)
        else:
            while budget and self._waiting and not preempted and self._admit(self._waiting[0]):
                budget -= self._take(self._waiting.popleft(), budget, scheduled)
        return StepPlan(tuple(scheduled), tuple(preempted))

    def update(self, plan: StepPlan, sampled: Iterable[SampledToken]) -> list[TokenEvent]:
        """Record what a completed step computed and picked. Tokens of requests that ended meanwhile are dropped."""
        for part in plan.scheduled:
            self._collected(part)
        found = {token.request_id: token for token in sampled}
        living = [part for part in plan.scheduled if part.request.id in self._running]
        return [self._event(part, found.get(part.request.id)) for part in living]

    def fail(self, plan: StepPlan, error: str) -> list[TokenEvent]:
        """A step failed: the requests it ran end with `error`, and what it computed is not used."""
        events = []
        self._counters.failed_steps += 1
        for part in plan.scheduled:
            part.request.steps_under_way -= 1
            if part.request.id in self._running:
                self._finish(part.request)
                events.append(TokenEvent(part.request.id, None, finish=FinishReason.ERROR, error=error))
            self._let_go(part.request)
        return events

    def abort(self, request_id: int) -> TokenEvent | None:
        """End a request in any state; None when there is no such request any more."""
        waiting = next((request for request in self._waiting if request.id == request_id), None)
        request = self._running.get(request_id, waiting)
        if request is None:
            return None
        self._finish(request)
        return TokenEvent(request_id, None, finish=FinishReason.ABORT)

    def abort_all(self) -> list[TokenEvent]:
        """End every request. The caller knows that no step is under way any more."""
        there = [*self._running.values(), *self._waiting]
        for request in (*there, *self._ending.values()):
            request.steps_under_way = 0
        for request in there:
            self._finish(request)
        for request in list(self._ending.values()):
            self._let_go(request)
        return [TokenEvent(request.id, None, finish=FinishReason.ABORT) for request in there]

    def assert_empty(self) -> None:
        """Raise RuntimeError when a request or a block is still held."""
        self._blocks.check()
        if self.has_work or self._blocks.num_free != self._blocks.num_usable:
            raise RuntimeError(
                f"{len(self._waiting)} waiting, {len(self._running)} running, {len(self._ending)} ending, "
                f"{self._blocks.num_free} of {self._blocks.num_usable} blocks free"
            )

    # -- joining

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a seat and its cached prefix, if its tokens and one more fit what is free."""
        if len(self._running) >= self._config.max_running:
            return False
        # The last token is always computed: its logits are what the next one is picked from. A prompt to be reported
        # on is computed whole, since cached keys and values tell no logits.
        most = (request.num_tokens - 1) // BLOCK_SIZE if request.params.prompt_logprobs is None else 0
        blocks, keys = self._blocks.find(self._root(request), request.token_ids(0, request.num_tokens), most)
        if _blocks_for(request.num_tokens + 1) - len(blocks) > self._blocks.num_free:
            self._blocks.release(blocks)
            return False
        request.block_table[:], request.block_keys[:] = blocks, keys
        request.num_computed = request.num_scheduled = len(blocks) * BLOCK_SIZE
        if not request.num_preemptions:
            request.num_cached = request.num_computed
            self._counters.prompt_tokens += len(request.prompt_ids)
            self._counters.cached_tokens += request.num_cached
        request.status = RequestStatus.RUNNING
        self._running[request.id] = request
        return True

    def _root(self, request: Request) -> BlockKey:
        return root_key(*self._config.cache_salt, request.origin.cache_salt)

    # -- running

    def _wanted(self, request: Request) -> int:
        """Tokens that the request has to catch up on. None once its last token is being sampled."""
        target = request.num_tokens + request.num_pending
        return 0 if target >= self._room(request) else target - request.num_scheduled

    def _reserve(self, request: Request, budget: int, preempted: list[Request]) -> bool:
        """Make sure there are blocks for the request's next tokens; younger ones give way, or else it does itself.

        False when it gave way, or must wait: who should give way is part of a step under way.
        """
        needed = _blocks_for(request.num_scheduled + min(budget, self._wanted(request))) - len(request.block_table)
        while needed > self._blocks.num_free:
            youngest = next(reversed(self._running.values()))
            if youngest.steps_under_way or (youngest is request and self._ending):
                return False
            self._preempt(youngest)
            preempted.append(youngest)
            if youngest is request:
                return False
        return True

    def _take(self, request: Request, budget: int, scheduled: list[ScheduledRequest]) -> int:
        count = min(budget, self._wanted(request))
        if not count:
            return 0
        start, known = request.num_scheduled, request.num_tokens
        samples = start + count == known + request.num_pending
        needed = _blocks_for(start + count) - len(request.block_table)
        request.block_table.extend(self._blocks.allocate(max(0, needed)))
        reported = _to_report(request, start, start + count)
        request.num_reported = max(request.num_reported, reported.stop)
        scheduled.append(ScheduledRequest(request, start, count, samples, start + count > known, reported))
        request.num_scheduled += count
        request.num_pending += samples
        request.steps_under_way += 1
        return count

    def _preempt(self, request: Request) -> None:
        del self._running[request.id]
        self._release(request)
        request.num_computed = request.num_scheduled = 0
        request.num_preemptions += 1
        self._counters.recomputed += 1
        request.status = RequestStatus.WAITING
        self._waiting.appendleft(request)

    # -- after a step

    def _collected(self, part: ScheduledRequest) -> None:
        request = part.request
        request.steps_under_way -= 1
        request.num_pending -= part.samples
        request.num_computed = part.stop
        self._counters.computed_tokens += part.num_tokens
        if request.status is RequestStatus.RUNNING:
            self._publish(request)
        self._let_go(request)

    def _publish(self, request: Request) -> None:
        """Make the blocks that are full now findable."""
        parent = BlockKey(request.block_keys[-1]) if request.block_keys else self._root(request)
        for index in range(len(request.block_keys), request.num_computed // BLOCK_SIZE):
            token_ids = request.token_ids(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
            parent = block_key(parent, token_ids)
            self._blocks.publish(request.block_table[index], parent, token_ids)
            request.block_keys.append(parent)

    def _event(self, part: ScheduledRequest, found: SampledToken | None) -> TokenEvent:
        """What a step meant for one of its requests: a token, or that a part of the prompt was computed."""
        request, prompt = part.request, () if found is None else found.prompt_logprobs
        if found is None or found.token_id is None:
            return TokenEvent(request.id, None, num_computed=part.stop, prompt_logprobs=prompt)
        request.output_ids.append(found.token_id)
        self._counters.generated_tokens += 1
        finish = self._finish_reason(request, found.token_id)
        if finish is not None:
            self._finish(request)
        return TokenEvent(request.id, found.token_id, found.logprobs, finish, prompt_logprobs=prompt)

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

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        else:
            del self._running[request.id]
            self._ending[request.id] = request
        request.status = RequestStatus.FINISHED
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Free a finished request's blocks once no step under way can write to them."""
        if request.status is RequestStatus.FINISHED and not request.steps_under_way:
            self._ending.pop(request.id, None)
            self._release(request)

    def _release(self, request: Request) -> None:
        self._blocks.release(request.block_table)
        request.block_table.clear()
        request.block_keys.clear()


def _to_report(request: Request, start: int, stop: int) -> range:
    """The positions from start to stop that predict a token of the prompt, and were not reported before."""
    if request.params.prompt_logprobs is None:
        return range(0)
    first = max(start, request.num_reported)
    return range(first, max(first, min(stop, len(request.prompt_ids) - 1)))


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
