"""The searches of a scheduler: which requests stand for their beams, and what becomes of those. No torch.

A search begins as one request, which reads the prompt. When all its beams have delivered and several go on from one of
them, the first does so in that beam's request and the others fork off, so that they share its blocks. A search that
has to yield gives everything back but what its beams have in common: one request again, behind which they fork off when
that is computed. It keeps the seats of all its beams from its first to its last step.

Beams have ids below zero; those of results are the submitter's. Refuses to know which sequences are good, and who has
to yield.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.config import BLOCK_SIZE, EngineConfig
from engine.counters import Counters
from engine.errors import InvalidSampling, PromptTooLong
from engine.kv.groups import blocks_for
from engine.kv.memory import KVMemory
from engine.request import FinishReason, Request, RequestStatus, TokenEvent
from engine.sampling_params import BeamParams, BeamSampling
from engine.scheduling.beam import Beam, BeamSearch
from engine.scheduling.priority import is_urgent
from engine.step import SampledToken


@dataclass(slots=True, eq=False)
class Search:
    """One beam search. `results` are requests that nothing runs: each becomes one of the best sequences at the end."""

    results: tuple[Request, ...]
    beams: BeamParams
    policy: BeamSearch
    max_tokens: int  # of a reply
    requests: list[Request] = field(default_factory=list)  # of the live beams; or one, of what they have in common


class Searches:
    """`withdraw` ends a request that stands for a beam, in any state and without a word to anyone."""

    def __init__(
        self,
        config: EngineConfig,
        memory: KVMemory,
        running: dict[int, Request],
        counters: Counters,
        withdraw: Callable[[Request], None],
    ) -> None:
        self._config = config
        self._memory = memory
        self._running = running
        self._counters = counters
        self._withdraw = withdraw
        self._ids = itertools.count(-1, -1)
        self._by_result: dict[int, Search] = {}

    def prepare(self, results: Sequence[Request], beams: BeamParams, most: int) -> None:
        """Make requests the results of one search, for `begin`; each has `most` tokens at most, prompt included.

        Changes nothing here, so that any thread may call it. Raises InvalidSampling or PromptTooLong, with the numbers,
        for a search that never fits.
        """
        prompt, params = results[0].prompt_ids, results[0].params
        if beams.width > self._config.max_running:
            problem = f"a search this wide needs {beams.width} places, and there are {self._config.max_running}"
            raise InvalidSampling("width", problem)
        fits = min(self._most_tokens(number, len(prompt), beams.width) for number in range(len(self._memory.groups)))
        if fits <= len(prompt) or (params.max_tokens is not None and fits < most):
            raise PromptTooLong(
                f"A search {beams.width} wide behind a prompt of {len(prompt):,} tokens has room for "
                f"{max(0, fits - len(prompt)):,} tokens of reply",
                "Choose a smaller width or max_tokens, or shorten the prompt.",
            )
        max_tokens = min(fits, most) - len(prompt)
        search = Search(tuple(results), beams, BeamSearch(beams, params, results[0].end_ids, max_tokens), max_tokens)
        for result in results:
            result.search = search

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

    def begin(self, search: Search) -> Request:
        """The request that reads the prompt."""
        first = search.results[0]
        params = BeamSampling(
            temperature=0,
            max_tokens=search.max_tokens,
            logprobs=search.policy.alternatives,
            prompt_logprobs=first.params.prompt_logprobs,
        )
        root = Request(next(self._ids), first.prompt_ids, params, first.end_ids, first.origin, search=search)
        root.beam, root.arrival = search.policy.common(), first.arrival
        search.requests = [root]
        self._by_result.update((result.id, search) for result in search.results)
        return root

    # -- seats

    def seats(self, request: Request) -> int:
        """How many a request takes. A search that has yielded often runs alone: it then has all memory there is."""
        if request.search is None:
            return 1
        return self._config.max_running if is_urgent(request) else request.search.beams.width

    @property
    def seats_kept(self) -> int:
        """Free seats that are for beams to come."""
        seated = {search for search in self._by_result.values() if search.requests[0].id in self._running}
        return sum(self.seats(search.requests[0]) - len(search.requests) for search in seated)

    # -- what happens to a search

    def of_result(self, request_id: int) -> Search | None:
        """The search that still runs for a result."""
        return self._by_result.get(request_id)

    def told(self, request: Request, computed: int, found: SampledToken | None) -> list[TokenEvent]:
        """What a step found for one of its requests."""
        search, events = _search_of(request), []
        if found is not None and found.problem:
            return self.end(search, found.reason, found.problem)
        if found is not None and found.prompt_logprobs:
            events = [
                TokenEvent(result.id, None, num_computed=computed, prompt_logprobs=found.prompt_logprobs)
                for result in search.results
            ]
        if found is None or found.token_id is None:
            return events or [TokenEvent(search.results[0].id, None, num_computed=computed)]
        if request.beam not in search.policy.live:
            self._go_on(search, {request: search.policy.live})
        elif found.logprobs is not None and search.policy.collect(request.beam, found.logprobs.top):
            self._advance(search)
            if search.policy.has_ended:
                events += self._conclude(search)
        return events

    def _advance(self, search: Search) -> None:
        search.policy.advance()
        children: dict[Request, list[Beam]] = {}
        for request in search.requests:
            children[request] = [beam for beam in search.policy.live if beam.before is request.beam]
        if not search.policy.has_ended:
            self._go_on(search, children)

    def _go_on(self, search: Search, children: dict[Request, list[Beam]]) -> None:
        """Have each request go on as the first of its children, and the others behind its computed tokens."""
        forked = []
        for parent, beams in children.items():
            for beam in beams[1:]:
                child = _fork_of(parent, next(self._ids), beam)
                self._memory.fork(parent, child, parent.num_computed)
                self._running[child.id] = child
                forked.append(child)
        for parent, beams in children.items():
            if beams:
                parent.beam = beams[0]
                parent.output_ids += beams[0].token_ids(len(parent.output_ids))
            else:
                self._withdraw(parent)
        search.requests = [parent for parent, beams in children.items() if beams] + forked

    def fold(self, search: Search) -> Request:
        """One running request for what the beams have in common, none of whose steps is under way."""
        if len(search.requests) > 1:
            first = search.requests[0]
            root = _fork_of(first, next(self._ids), search.policy.common())
            search.policy.forget_round()
            for request in search.requests:
                self._withdraw(request)
            search.requests = [root]
            self._running[root.id] = root
        return search.requests[0]

    def mirror(self, request: Request) -> None:
        """Results are where the search is."""
        for result in request.search.results if request.search else ():
            result.status, result.cache, result.seated = request.status, request.cache, request.seated

    def end(self, search: Search, finish: FinishReason, error: str = "") -> list[TokenEvent]:
        """End a search before its time; nothing where it has ended."""
        if not self._forget(search):
            return []
        return [TokenEvent(result.id, None, finish=finish, error=error) for result in search.results]

    def _conclude(self, search: Search) -> list[TokenEvent]:
        """Every result gets its sequence."""
        self._forget(search)
        events = []
        for result, hypothesis in zip(search.results, search.policy.hypotheses, strict=False):
            path = hypothesis.beam.path()
            result.output_ids[:] = [beam.token_id for beam in path]
            self._counters.generated_tokens += len(path)
            events += [TokenEvent(result.id, beam.token_id, beam.logprobs) for beam in path[:-1]]
            events.append(TokenEvent(result.id, path[-1].token_id, path[-1].logprobs, hypothesis.finish))
        return events

    def _forget(self, search: Search) -> bool:
        if search.results[0].id not in self._by_result:
            return False
        for result in search.results:
            del self._by_result[result.id]
        for request in search.requests:
            self._withdraw(request)
        self.mirror(search.requests[0])
        return True


def party(request: Request) -> Search | Request:
    """Who yields together with a request."""
    return request.search or request


def _search_of(request: Request) -> Search:
    if request.search is None:
        raise ValueError(f"request {request.id} is no beam")
    return request.search


def _fork_of(parent: Request, request_id: int, beam: Beam) -> Request:
    """A request for another beam of the search, without blocks."""
    return Request(
        request_id,
        parent.prompt_ids,
        parent.params,
        parent.end_ids,
        parent.origin,
        output_ids=beam.token_ids(),
        cache=parent.cache,
        num_preemptions=parent.num_preemptions,
        arrival=parent.arrival,
        num_reported=parent.num_reported,
        status=RequestStatus.RUNNING,
        search=parent.search,
        beam=beam,
    )
