"""Beam groups: the requests that compute the beams of one search, from their common prompt to the results.

A group starts as one request, which reads the prompt. When all its beams have delivered and several continue from one
of them, the first does so in that beam's request and the others fork from it, so that they share its blocks. A
preempted group keeps what its beams have in common: one request again, from which they fork when that is computed.

Requests of beams have ids below zero; those of results are the caller's.
"""

import itertools
from collections.abc import Sequence

from engine.config import BLOCK_SIZE, EngineConfig
from engine.counters import Counters
from engine.errors import InvalidSampling, PromptTooLong
from engine.kv.groups import blocks_for
from engine.kv.memory import KVMemory
from engine.request import FinishReason, Request, RequestStatus, TokenEvent
from engine.sampling_params import BeamParams, BeamSampling
from engine.scheduling.beam import Beam, BeamGroup, BeamSearch
from engine.scheduling.running_set import RunningSet
from engine.step import SampledToken


class BeamGroups:
    """Starts beam groups, advances them with what steps have found, folds them for preemption, and ends them."""

    def __init__(self, config: EngineConfig, requests: RunningSet, memory: KVMemory, counters: Counters) -> None:
        self._config = config
        self._requests = requests
        self._memory = memory
        self._counters = counters
        self._ids = itertools.count(-1, -1)

    # -- what fits

    def max_tokens(self, result: Request, beams: BeamParams) -> int:
        """The longest reply that a search may get. Any thread may call it.

        Raises InvalidSampling or PromptTooLong, with the numbers, for a search that never fits.
        """
        prompt, most = len(result.prompt_ids), self._memory.max_tokens(result)
        if beams.width > self._config.max_running:
            problem = f"a search this wide needs {beams.width} slots, and there are {self._config.max_running}"
            raise InvalidSampling("width", problem)
        fits = min(self._most_tokens(number, prompt, beams.width) for number in range(len(self._memory.groups)))
        if fits <= prompt or (result.params.max_tokens is not None and fits < most):
            raise PromptTooLong(
                f"A search {beams.width} wide behind a prompt of {prompt:,} tokens has room for "
                f"{max(0, fits - prompt):,} tokens of reply",
                "Choose a smaller width or max_tokens, or shorten the prompt.",
            )
        return min(fits, most) - prompt

    def _most_tokens(self, number: int, prompt: int, width: int) -> int:
        """How long all beams can get at once, by the memory of one KV group."""
        group, window = self._memory.groups[number], self._config.groups[number].window
        blocks = group.pool.num_usable
        shared = prompt // BLOCK_SIZE
        if group.is_state:
            # One at a time has a second state while it takes a step.
            return self._config.context_length if blocks > width else 0
        if window and width * (blocks_for(window + self._config.max_step_tokens) + 1) <= blocks:
            return self._config.context_length
        return BLOCK_SIZE * (shared + max(0, blocks - shared) // width)

    # -- from start to end

    def start(self, results: Sequence[Request], beams: BeamParams) -> Request:
        """Start the search that `max_tokens` let pass. Returns the request that reads its prompt, to be queued."""
        first, max_tokens = results[0], self.max_tokens(results[0], beams)
        policy = BeamSearch(beams, first.params, first.end_ids, max_tokens)
        params = BeamSampling(
            temperature=0,
            max_tokens=max_tokens,
            logprobs=policy.alternatives,
            prompt_logprobs=first.params.prompt_logprobs,
        )
        root = Request(next(self._ids), first.prompt_ids, params, first.end_ids, first.origin, queue=first.queue)
        for result in results:
            result.queue = root.queue
        self._requests.add_group(BeamGroup(tuple(results), beams, policy, max_tokens, {root: policy.common()}))
        return root

    def update(self, group: BeamGroup, request: Request, computed: int, found: SampledToken | None) -> list[TokenEvent]:
        """Advance a group by what a step has found for one of its requests."""
        events = []
        if found is not None and found.problem:
            return self.end(group, found.reason, found.problem)
        if found is not None and found.prompt_logprobs:
            events = [
                TokenEvent(result.id, None, num_computed=computed, prompt_logprobs=found.prompt_logprobs)
                for result in group.results
            ]
        if found is None or found.token_id is None:
            return events or [TokenEvent(group.results[0].id, None, num_computed=computed)]
        beam = group.live[request]
        if beam not in group.policy.live:
            self._continue(group, {request: group.policy.live})
        elif found.logprobs is not None and group.policy.collect(beam, found.logprobs.top):
            self._advance(group)
            if group.policy.has_ended:
                events += self._finish(group)
        return events

    def _advance(self, group: BeamGroup) -> None:
        group.policy.advance()
        if not group.policy.has_ended:
            live = group.policy.live
            self._continue(group, {it: [new for new in live if new.before is old] for it, old in group.live.items()})

    def _continue(self, group: BeamGroup, children: dict[Request, list[Beam]]) -> None:
        """Have each request continue as the first of its children, and the others fork after its computed tokens."""
        forked: dict[Request, Beam] = {}
        for parent, beams in children.items():
            for beam in beams[1:]:
                child = _fork_of(parent, next(self._ids), beam)
                self._memory.fork(parent, child, parent.num_computed)
                self._requests.add_beam(group, child)
                forked[child] = beam
        for parent, beams in children.items():
            if beams:
                parent.output_ids += beams[0].token_ids(len(parent.output_ids))
            else:
                self._requests.drop_beam(parent)
        group.live = {parent: beams[0] for parent, beams in children.items() if beams} | forked

    def collapse(self, group: BeamGroup) -> Request:
        """Replace the requests of a group, none of which is in a step under way, by one for their common part."""
        requests = group.requests
        if len(requests) > 1:
            common = group.policy.common()
            root = _fork_of(requests[0], next(self._ids), common)
            group.policy.discard_round()
            for request in requests:
                self._requests.drop_beam(request)
            group.live = {root: common}
            self._requests.add_beam(group, root)
        return group.requests[0]

    def end(self, group: BeamGroup, finish: FinishReason, error: str = "") -> list[TokenEvent]:
        """End a running group before its time."""
        self._requests.drop_group(group)
        return [TokenEvent(result.id, None, finish=finish, error=error) for result in group.results]

    def _finish(self, group: BeamGroup) -> list[TokenEvent]:
        """Every result gets its sequence."""
        self._requests.drop_group(group)
        events = []
        for result, hypothesis in zip(group.results, group.policy.hypotheses, strict=False):
            path = hypothesis.beam.path()
            result.output_ids[:] = [beam.token_id for beam in path]
            self._counters.generated_tokens += len(path)
            events += [TokenEvent(result.id, beam.token_id, beam.logprobs) for beam in path[:-1]]
            events.append(TokenEvent(result.id, path[-1].token_id, path[-1].logprobs, hypothesis.finish))
        return events


def _fork_of(parent: Request, request_id: int, beam: Beam) -> Request:
    """A request for another beam of the group, without blocks."""
    return Request(
        request_id,
        parent.prompt_ids,
        parent.params,
        parent.end_ids,
        parent.origin,
        output_ids=beam.token_ids(),
        cache=parent.cache,
        queue=parent.queue,
        num_preemptions=parent.num_preemptions,
        num_prompt_logprobs=parent.num_prompt_logprobs,
        status=RequestStatus.RUNNING,
    )
