"""Beam groups: the requests that compute the beams of one search, from the prompt to the results.

A group starts as one request, which prefills the prompt. In each round, once all beams have delivered, the first
survivor of a beam continues in that beam's request. The other survivors of the beam are forks that share its blocks. A
preempted group is reduced to one request for the common prefix of its beams, from which they fork again later.

Requests that compute beams have negative ids. The results have the ids that the caller chose.
"""

import itertools
from collections.abc import Sequence

from engine.config import BLOCK_SIZE, EngineConfig
from engine.counters import Counters
from engine.errors import InvalidSampling, PromptTooLong
from engine.kv.memory import KVMemory
from engine.kv.request_blocks import blocks_for
from engine.request import FinishReason, Request, RequestStatus, TokenEvent
from engine.sampling_params import BeamParams, BeamSampling
from engine.scheduling.beam import Beam, BeamGroup, BeamSearch
from engine.scheduling.running_set import RunningSet
from engine.step import SampledToken


class BeamGroups:
    """Starts beam groups, advances them after each step, collapses them for preemption, and ends them."""

    def __init__(self, config: EngineConfig, requests: RunningSet, memory: KVMemory, counters: Counters) -> None:
        self._config = config
        self._requests = requests
        self._memory = memory
        self._counters = counters
        self._ids = itertools.count(-1, -1)

    # -- limits

    def max_tokens(self, result: Request, beams: BeamParams) -> int:
        """Return the maximum length of a reply, in tokens, that a search can produce. Any thread may call this.

        Raises InvalidSampling or PromptTooLong, with the numbers, if the search can never fit.
        """
        prompt, most = len(result.prompt_ids), self._memory.max_tokens(result)
        if beams.width > self._config.max_running:
            problem = f"a beam search of this width needs {beams.width} slots, but there are {self._config.max_running}"
            raise InvalidSampling("width", problem)
        fits = min(self._most_tokens(number, prompt, beams.width) for number in range(len(self._memory.groups)))
        if fits <= prompt or (result.params.max_tokens is not None and fits < most):
            raise PromptTooLong(
                f"A beam search of width {beams.width} after a prompt of {prompt:,} tokens leaves space for "
                f"{max(0, fits - prompt):,} tokens of reply",
                "Choose a smaller width or max_tokens, or shorten the prompt.",
            )
        return min(fits, most) - prompt

    def _most_tokens(self, number: int, prompt: int, width: int) -> int:
        """Return the number of tokens that every beam can reach at the same time with the memory of one KV group."""
        group, window = self._memory.groups[number], self._config.groups[number].window
        blocks = group.pool.num_usable
        shared = prompt // BLOCK_SIZE
        if group.is_state:
            # Each beam holds a state. The beams are computed one at a time, and each step needs one more state.
            return self._config.context_length if blocks > width else 0
        if window and width * (blocks_for(window + self._config.max_step_tokens) + 1) <= blocks:
            return self._config.context_length
        return BLOCK_SIZE * (shared + max(0, blocks - shared) // width)

    # -- lifecycle

    def start(self, results: Sequence[Request], beams: BeamParams) -> Request:
        """Start a search that `max_tokens` accepts.

        Returns the request that prefills its prompt. The caller adds it to the waiting queue.
        """
        first, max_tokens = results[0], self.max_tokens(results[0], beams)
        policy = BeamSearch(beams, first.params, first.end_ids, max_tokens)
        params = BeamSampling(
            temperature=0,
            max_tokens=max_tokens,
            logprobs=policy.alternatives,
            prompt_logprobs=first.params.prompt_logprobs,
        )
        root = Request(
            next(self._ids), first.prompt_ids, params, first.end_ids, first.origin, first.marks, queue=first.queue
        )
        for result in results:
            result.queue = root.queue
        self._requests.add_group(BeamGroup(tuple(results), beams, policy, max_tokens, {root: policy.common()}))
        return root

    def update(self, group: BeamGroup, request: Request, computed: int, found: SampledToken | None) -> list[TokenEvent]:
        """Advance a group with the result of a step for one of its requests, and return the events."""
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
        """Advance each request to the first of its surviving beams, and fork a request for each of the others.

        The forks share the blocks of the computed tokens. Requests without survivors end.
        """
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
        """Replace the requests of a group by one for their common prefix. No step under way may include any of them."""
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
        """End a running group early, and return the events of its results."""
        self._requests.drop_group(group)
        return [TokenEvent(result.id, None, finish=finish, error=error) for result in group.results]

    def _finish(self, group: BeamGroup) -> list[TokenEvent]:
        """End a finished search: give every result its sequence, and return the events."""
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
    """Return a request for another beam of the group. It holds no blocks yet."""
    return Request(
        request_id,
        parent.prompt_ids,
        parent.params,
        parent.end_ids,
        parent.origin,
        parent.marks,
        output_ids=beam.token_ids(),
        cache=parent.cache,
        queue=parent.queue,
        num_preemptions=parent.num_preemptions,
        num_prompt_logprobs=parent.num_prompt_logprobs,
        status=RequestStatus.RUNNING,
    )
