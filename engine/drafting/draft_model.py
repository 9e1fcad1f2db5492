"""DraftModel: a small model that drafts the next tokens of a larger model's requests, greedily.

Each request has a shadow: a request of the small model with the same tokens, and with blocks in the small model's own
KV cache. Drafted tokens that the reply did not accept are overwritten. The shadow that drafted longest ago loses its
blocks if another one needs them.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config import BLOCK_SIZE, EngineConfig
from engine.cost_model import CostModel
from engine.counters import Counters
from engine.draft import Draft, Source
from engine.kv.memory import KVMemory
from engine.request import Origin, Request
from engine.sampling_params import SamplingParams
from engine.step import Runner, SampledToken, ScheduledRequest, StepPlan

GREEDY = SamplingParams(temperature=0, logprobs=0)
TRIAL_TOKENS = 64  # length of the prompt with which `measure` measures the time of steps
TRIAL_ROUNDS = 4

GoesOn = Callable[[Draft], bool]


@dataclass(slots=True, eq=False)
class _Shadow:
    """The small model's request for one of the large model's requests."""

    own: Request
    num_known: int = 0  # number of tokens that the two requests have in common
    percentages: list[int] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        """Number of tokens to compute before the next one can be drafted."""
        return self.own.num_tokens - self.own.num_computed

    @property
    def draft(self) -> Draft:
        """The tokens that only the small model's request has."""
        token_ids = self.own.token_ids(self.num_known, self.own.num_tokens)
        return Draft(Source.MODEL, 0, tuple(token_ids), tuple(self.percentages))


class DraftModel:
    """A loaded small model and the shadows of the requests that it has drafted for."""

    def __init__(self, config: EngineConfig, vocab_size: int, target_vocab_size: int, runner: Runner[Any]) -> None:
        """`target_vocab_size` is the number of logits of the large model. No token id at or above it is drafted."""
        self._config = config
        self._vocab_size = vocab_size
        self._target_vocab_size = target_vocab_size
        self._costs = CostModel(config)
        self._memory = KVMemory(config, None, None, self._costs, Counters(), time.monotonic)
        self._runner = runner
        self._shadows: dict[int, _Shadow] = {}  # by request id; the one that was used longest ago is first

    def measure(self) -> None:
        """Measure the time of steps, so that the first plans can rely on it."""
        for number in range(TRIAL_ROUNDS):
            prompt = tuple(1 + (number + i) % 7 for i in range(TRIAL_TOKENS))  # different first blocks
            trial = Request(0, prompt, GREEDY)
            self.draft([trial], TRIAL_ROUNDS, lambda draft: True)
            self.drop(trial.id)

    def seconds(self, requests: int) -> float:
        """Return the expected time of a step that drafts one token for each of `requests` requests."""
        return self._costs.steps.small.expected(requests)

    def prefill_seconds(self, tokens: int) -> float:
        """Return the expected time for computing `tokens` tokens of prompts."""
        return tokens * self._costs.steps.per_token

    @property
    def max_step_tokens(self) -> int:
        """Maximum number of tokens of a step."""
        return self._config.max_step_tokens

    def can_follow(self, request: Request) -> bool:
        """Whether the model can draft for a request: its context is long enough, and its vocabulary has the tokens."""
        shadow = self._shadows.get(request.id)
        new = request.token_ids(shadow.num_known if shadow else 0, request.num_tokens)
        return request.num_tokens < self._memory.context and max(new, default=0) < self._vocab_size

    def num_missing(self, request: Request) -> int:
        """Return the number of the request's tokens that must be computed before the model can draft for it."""
        return self._synchronized(request).num_missing

    def prefill(self, request: Request, most: int) -> None:
        """Compute at most `most` of the missing tokens, but leave one for the step that drafts."""
        shadow = self._synchronized(request)
        count = min(most, shadow.num_missing - 1, self._config.max_step_tokens)
        if count > 0 and self._allocate(shadow, count, [shadow]):
            self._compute([(shadow.own, count)])

    def draft(self, requests: Sequence[Request], depth: int, goes_on: GoesOn) -> dict[int, Draft]:
        """Draft up to `depth` tokens for each request, by request id, while `goes_on` of a request's draft is true.

        A request gets no draft if too few blocks are free, or if its missing tokens do not fit into the first step.
        """
        shadows = [self._synchronized(request) for request in requests]
        drafting, left = [], self._config.max_step_tokens
        for shadow in shadows:
            if shadow.num_missing <= left and self._allocate(shadow, shadow.num_missing + depth, shadows):
                drafting.append(shadow)
                left -= shadow.num_missing
        ends = {request.id: request.end_ids for request in requests}
        for _ in range(depth if drafting else 0):
            sampled = self._compute([(shadow.own, shadow.num_missing) for shadow in drafting])
            drafting = [
                shadow
                for shadow in drafting
                if self._append(shadow, sampled[shadow.own.id])
                and shadow.own.output_ids[-1] not in ends[shadow.own.id]
                and shadow.own.num_tokens < self._memory.context
                and goes_on(shadow.draft)
            ]
            if not drafting:
                break
        return {shadow.own.id: shadow.draft for shadow in shadows if shadow.percentages}

    def close(self) -> None:
        """Stop its threads, and free its memory."""
        self._runner.close()

    def forget(self, token_ids: Sequence[int], origin: Origin, kept: int) -> None:
        """See `KVMemory.forget`."""
        self._memory.forget(token_ids, origin, kept)

    def drop(self, request_id: int) -> None:
        """Release the blocks of a request. Those of its full blocks stay cached."""
        if shadow := self._shadows.pop(request_id, None):
            self._memory.publish(shadow.own)
            self._memory.release(shadow.own)

    def _append(self, shadow: _Shadow, token: SampledToken) -> bool:
        """Add a drafted token. Returns False if there is none that the large model knows."""
        if token.token_id is None or token.token_id >= self._target_vocab_size or token.logprobs is None:
            return False
        shadow.own.output_ids.append(token.token_id)
        shadow.percentages.append(round(100 * math.exp(token.logprobs.logprob)))
        return True

    def _synchronized(self, request: Request) -> _Shadow:
        """Return the request's shadow with exactly the request's tokens. It is moved to the end of the shadows."""
        shadow = self._shadows.pop(request.id, None) or self._new(request)
        self._shadows[request.id] = shadow
        own, new = shadow.own, request.token_ids(shadow.num_known, request.num_tokens)
        if new or shadow.percentages:
            right = shadow.draft.num_right(new)
            own.output_ids[shadow.num_known - len(own.prompt_ids) :] = new
            # the last token is computed again if the request has not changed: its logits give the first draft
            computed = min(own.num_computed, shadow.num_known + right, request.num_tokens - 1)
            own.num_computed = own.num_scheduled = computed
            shadow.num_known = request.num_tokens
            shadow.percentages = []
            self._memory.publish(own)
        return shadow

    def _new(self, request: Request) -> _Shadow:
        """Return a new shadow, which shares the blocks of the longest cached prefix."""
        own = Request(
            request.id,
            request.prompt_ids,
            GREEDY,
            origin=replace(request.origin, stored=False),
            output_ids=list(request.output_ids),
        )
        prefix = self._memory.match(own, (own.num_tokens - 1) // BLOCK_SIZE)
        if prefix is not None:
            self._memory.attach(own, prefix, prefix.blocks * BLOCK_SIZE)
        return _Shadow(own, own.num_tokens)

    def _allocate(self, shadow: _Shadow, tokens: int, kept: Sequence[_Shadow]) -> bool:
        """Allocate blocks for `tokens` more tokens of a shadow. Shadows other than `kept` may lose theirs.

        Returns False if that is not enough.
        """
        own = shadow.own
        stop = min(own.num_computed + tokens, self._memory.context)
        while not self._memory.can_allocate(own, stop):
            oldest = next((number for number, it in self._shadows.items() if it not in kept), None)
            if oldest is None:
                return False
            self.drop(oldest)
        self._memory.allocate(own, stop)  # copies nothing: shadows share only full blocks
        return True

    def _compute(self, parts: Sequence[tuple[Request, int]]) -> dict[int, SampledToken]:
        """Compute the next tokens of each request, and return the sampled tokens by request id."""
        scheduled = tuple(
            ScheduledRequest(
                own,
                own.num_computed,
                count,
                samples=own.num_computed + count == own.num_tokens,
                block_tables=self._memory.blocks_of(own).tables,
            )
            for own, count in parts
        )
        began = time.monotonic()
        sampled = self._runner.collect(self._runner.launch(StepPlan(scheduled)))
        self._costs.steps.observe(sum(count for _, count in parts), time.monotonic() - began)
        for own, count in parts:
            own.num_computed = own.num_scheduled = own.num_computed + count
        return {token.request_id: token for token in sampled}
