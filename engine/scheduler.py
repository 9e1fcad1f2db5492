"""The scheduler: which requests run in the next step, and how many tokens of each. No torch.

Continuous batching under one token budget: running requests catch up first, oldest first, then waiting ones join while
budget, seats and KV blocks last. A long prompt takes several steps. A request gets all the blocks it can ever need when
it joins, so that one that runs always finishes.

Refuses to know what a token means and where keys and values lie.
"""

from collections import deque
from collections.abc import Iterable

from engine.blocks import BlockPool
from engine.config import BLOCK_SIZE, EngineConfig
from engine.errors import PromptTooLong
from engine.request import (
    FinishReason,
    Request,
    RequestStatus,
    SampledToken,
    ScheduledRequest,
    StepPlan,
    TokenEvent,
)


class Scheduler:
    """Owns every request from `add` until the event that carries its finish reason."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._blocks = BlockPool(config.num_blocks)
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLong, with the numbers, for one that cannot run even alone."""
        self._refuse_what_never_fits(request)
        self._waiting.append(request)

    def schedule(self) -> StepPlan:
        """The next step. It may be empty only when nothing is running or waiting."""
        budget = self._config.max_step_tokens
        scheduled: list[ScheduledRequest] = []
        for request in self._running.values():
            budget -= self._take(request, budget, scheduled)
        while budget and self._waiting and self._admit(self._waiting[0]):
            budget -= self._take(self._waiting.popleft(), budget, scheduled)
        return StepPlan(tuple(scheduled))

    def update(self, plan: StepPlan, sampled: Iterable[SampledToken]) -> list[TokenEvent]:
        """Record what a step computed and picked. Requests aborted while it ran are passed over."""
        for part in plan.scheduled:
            part.request.num_computed += part.num_tokens
        return [self._append(token) for token in sampled if token.request_id in self._running]

    def abort(self, request_id: int) -> TokenEvent | None:
        """End a request in any state; None when there is no such request any more."""
        if request_id in self._running:
            self._finish(self._running[request_id])
            return TokenEvent(request_id, None, finish=FinishReason.ABORT)
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                request.status = RequestStatus.FINISHED
                return TokenEvent(request_id, None, finish=FinishReason.ABORT)
        return None

    def assert_empty(self) -> None:
        """Raise RuntimeError when a request or a block is still held."""
        self._blocks.check()
        if self.has_work or self._blocks.num_free != self._blocks.num_blocks - 1:
            raise RuntimeError(
                f"{len(self._waiting)} waiting, {len(self._running)} running, {self._blocks.num_free} blocks free"
            )

    # -- a request's steps through its states

    def _refuse_what_never_fits(self, request: Request) -> None:
        context = min(self._config.context_length, (self._config.num_blocks - 1) * BLOCK_SIZE)
        prompt = len(request.prompt_ids)
        if not prompt:
            raise PromptTooLong("The prompt is empty", "Send at least one token.")
        if prompt >= context:
            raise PromptTooLong(
                f"The prompt has {prompt:,} tokens, and the context holds {context:,} including the reply",
                "Shorten the prompt, or raise the context length.",
            )

    def _room(self, request: Request) -> int:
        """The most tokens the request may ever hold."""
        most = self._config.context_length
        if request.params.max_tokens is not None:
            most = min(most, len(request.prompt_ids) + request.params.max_tokens)
        return min(most, (self._config.num_blocks - 1) * BLOCK_SIZE)

    def _admit(self, request: Request) -> bool:
        needed = -(-self._room(request) // BLOCK_SIZE)
        if len(self._running) >= self._config.max_running or needed > self._blocks.num_free:
            return False
        request.block_table.extend(self._blocks.allocate(needed))
        request.status = RequestStatus.RUNNING
        self._running[request.id] = request
        return True

    def _take(self, request: Request, budget: int, scheduled: list[ScheduledRequest]) -> int:
        count = min(budget, request.num_tokens - request.num_computed)
        if count:
            scheduled.append(ScheduledRequest(request, count))
        return count

    def _append(self, token: SampledToken) -> TokenEvent:
        request = self._running[token.request_id]
        request.output_ids.append(token.token_id)
        finish = self._finish_reason(request, token.token_id)
        if finish is not None:
            self._finish(request)
        return TokenEvent(request.id, token.token_id, token.logprobs, finish)

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.params
        ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *request.end_ids)
        if token_id in ends:
            return FinishReason.STOP
        if request.num_tokens >= self._room(request):
            return FinishReason.LENGTH
        return None

    def _finish(self, request: Request) -> None:
        del self._running[request.id]
        self._blocks.release(request.block_table)
        request.block_table.clear()
        request.status = RequestStatus.FINISHED
