"""Verification of drafts: chooses the drafted tokens of a step, and records how many of them a reply accepted.

The keys and values of rejected tokens are overwritten by later steps. A request whose layers have states, which cannot
be cut, computes its accepted tokens again.
"""

from collections.abc import Mapping, Sequence

from engine.config import BLOCK_SIZE, EngineConfig
from engine.cost_model import CostModel
from engine.counters import Counters
from engine.draft import Draft, DraftCounts
from engine.drafting.drafter import Drafter
from engine.drafting.plan import Room
from engine.kv.memory import KVMemory
from engine.request import Origin, Request
from engine.scheduling.running_set import RunningSet
from engine.step import ScheduledRequest

# maximum number of known tokens of a request that decodes; it has several after a grammar has forced some
MAX_KNOWN = 16


class Verification:
    """Adds drafted tokens to steps in which requests decode. Without a drafter it never adds any."""

    def __init__(
        self, config: EngineConfig, requests: RunningSet, memory: KVMemory, costs: CostModel, counters: Counters
    ) -> None:
        self._max_logit_rows = config.max_logit_rows
        self._has_states = config.has_states
        self._launches_ahead = config.step_depth > 1
        self._requests = requests
        self._memory = memory
        self._costs = costs
        self._counters = counters
        self.drafter = Drafter(costs.steps.small.expected) if config.drafts else None

    def choose(self, missing: Sequence[tuple[Request, int]], budget: int) -> Mapping[int, Draft]:
        """Return the drafts to verify in the next step, by request id.

        `missing` has the running requests with their number of known tokens that no step has computed, and `budget` is
        the maximum number of tokens in the step.
        """
        if self.drafter is None:
            return {}
        self.drafter.drop_ended(self._requests.running)
        decoding = [request for request, count in missing if _decodes(request, count)]
        drafting = [it for it in decoding if self._may_draft(it) and not self._requests.parts_of(it)]
        if not drafting or not self.drafter.has_drafts(drafting):
            return {}
        known = sum(count for _, count in missing)
        most = min(budget, self._max_logit_rows or budget) - known
        drafts = self.drafter.choose(
            drafting,
            Room(
                decoding=len(decoding),
                forced=known - len(decoding),
                most=self._costs.draft_budget(len(decoding), known, most),
                longest=self._costs.longest_step(len(decoding)),
                prefills=bool(self._requests.waiting)
                or any(it and not _decodes(request, it) for request, it in missing),
                ahead=self._launches_ahead and len(decoding) > 1 and any(it.runs_ahead for it in drafting),
            ),
        )
        return {**drafts, **self._allowed([request for request in decoding if request.id in drafts], drafts, known)}

    def _allowed(self, requests: Sequence[Request], drafts: Mapping[int, Draft], known: int) -> dict[int, Draft]:
        """Return the part that the grammar allows of each draft of a request with a grammar, by request id.

        The masks for a draft are computed during the step. A step does not wait for them, so that a slow grammar has
        short drafts.
        """
        held = [(it.id, it.constraint, drafts[it.id]) for it in requests if it.constraint is not None]
        tokens = known + sum(len(draft.token_ids) for draft in drafts.values())
        seconds = self._costs.steps.small.expected(tokens) / max(1, len(held))
        for _, constraint, draft in held:  # all are started first, so that grammar processes work in parallel
            constraint.prefetch_look_ahead(draft.token_ids, seconds)
        return {
            request_id: draft.in_runs(constraint.look_ahead(draft.token_ids, seconds))
            for request_id, constraint, draft in held
        }

    def waits(self, request: Request) -> bool:
        """Whether the next step of a request, which could be launched ahead, should wait for the step under way.

        It is then likely to verify a draft.
        """
        alone = len(self._requests.running) == 1 and not self._requests.waiting
        return self.drafter is not None and alone and self._may_draft(request) and self.drafter.expects_draft(request)

    def fitting(self, request: Request, start: int, draft: Draft) -> Draft:
        """Return the part of a draft for which the request's length and the free blocks leave room.

        `start` is the number of tokens before it.
        """
        # A further token is sampled after the last draft.
        most = min(self._memory.max_tokens(request) - 1, self._memory.limit_step(request, start + len(draft.token_ids)))
        count = min(len(draft.token_ids), max(0, most - start))
        # Drafts must not take the last blocks, or another request would be preempted for them.
        spare = BLOCK_SIZE * len(self._requests.running)
        while count and not self._memory.can_allocate(request, start + count + spare):
            count -= 1
        return draft.first(count)

    def finish(self, part: ScheduledRequest) -> None:
        """Record how many drafted tokens of a completed step the reply accepted."""
        request, known = part.request, part.start + part.num_known
        # The last token of a reply may equal the draft, but no token was sampled after it.
        accepted = part.draft.num_right(request.token_ids(known, request.num_tokens - 1))
        counts, source = DraftCounts(len(part.drafted), accepted), part.draft.source
        request.drafts += counts
        self._counters.computed_tokens += accepted
        # A new mapping, because other threads may read the old one.
        self._counters.drafts = {**self._counters.drafts, source: self._counters.drafts[source] + counts}
        if accepted == len(part.drafted):
            self._memory.release_sources(part.copies)
            request.num_computed = part.stop
        elif self._has_states:  # a state cannot be cut, so its tokens are computed again
            self._memory.undo(request, part.copies)
            request.num_scheduled = part.start
        else:
            self._memory.release_sources(part.copies)
            request.num_computed = request.num_scheduled = known + accepted
        self._memory.publish(request)
        self._requests.collect(part)

    def forget(self, token_ids: Sequence[int], origin: Origin, kept: int) -> None:
        """See `Drafter.forget`."""
        if self.drafter is not None:
            self.drafter.forget(token_ids, origin, kept)

    def _may_draft(self, request: Request) -> bool:
        """Whether drafts of a request can be verified when none of its tokens are being sampled."""
        # the choices of a beam search depend on tokens that are not known yet
        in_group = self._requests.group_of(request) is not None
        return request.params.drafts and bool(request.output_ids) and not in_group


def _decodes(request: Request, count: int) -> bool:
    """Whether `count` is the number of missing tokens of a request that decodes, and does not prefill."""
    return count == 1 or (1 < count <= MAX_KNOWN and bool(request.output_ids))
