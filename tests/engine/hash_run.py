"""Drives an engine over the hash model and compares its tokens with the expected ones."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.core import Engine
from engine.request import PROGRAM, FinishReason, Origin, Request, TokenEvent
from engine.sampling_params import BeamParams, SamplingParams
from engine.scheduling.beam import BeamGroup
from tests.support.hash_model import HashTicket, expected_output, variant_of
from tests.support.reference_beam_search import reference_beam_search

ENDS = frozenset(range(100))  # end tokens, one in fifty of the generated tokens


# end tokens for beam searches: one alternative in twenty, so that some beams end and others continue
FEW_ENDS = frozenset(range(5))


@dataclass
class Run:
    """The requests of one engine, and the tokens and finish reasons that they got."""

    engine: Engine[HashTicket]
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    groups: dict[int, BeamGroup] = field(default_factory=dict)  # keyed by the id of a result

    def submit(
        self,
        prompt: tuple[int, ...],
        origin: Origin = PROGRAM,
        count: int = 1,
        marks: tuple[int, ...] = (),
        **params: object,
    ) -> Request:
        """Submit `count` requests with the same prompt. Returns the first of them."""
        drawn = [{"top_k": 1, "seed": seed} if count > 1 else {} for seed in range(count)]
        family = [
            self.engine.request(prompt, SamplingParams(**params, **own), ENDS, origin, marks)  # type: ignore[arg-type]
            for own in drawn
        ]
        self.engine.add(*family)
        for request in family:
            self.requests[request.id], self.outputs[request.id] = request, []
        return family[0]

    def search(
        self, prompt: tuple[int, ...], beams: BeamParams, origin: Origin = PROGRAM, **params: object
    ) -> list[Request]:
        """Submit a beam search and return its results."""
        wanted = SamplingParams(beams=beams, **params)  # type: ignore[arg-type]
        results = self.engine.search(prompt, wanted, FEW_ENDS, origin)
        self.engine.add(*results)
        group = self.engine._scheduler._requests.group_of(results[0])
        assert group
        self.groups |= {request.id: group for request in results}
        for request in results:
            self.requests[request.id], self.outputs[request.id] = request, []
        return results

    def step(self) -> None:
        self.record(self.engine.step())

    def record(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.finished
            if event.token_id is not None:
                self.outputs[event.request_id].append(event.token_id)
            if event.finish is not None:
                self.finished[event.request_id] = event.finish

    def abort(self, request_id: int) -> None:
        for event in self.engine.abort(request_id):
            self.finished[event.request_id] = FinishReason.ABORT

    def run_out(self) -> None:
        idle = 0
        while self.engine.has_work:
            before = sum(map(len, self.outputs.values())), len(self.finished)
            self.step()
            idle = idle + 1 if before == (sum(map(len, self.outputs.values())), len(self.finished)) else 0
            assert idle < 10_000, self.engine.state()
        self.engine.flush()
        self.engine.assert_empty()

    def check(self) -> None:
        """Assert that every request has ended with the tokens that its prompt determines."""
        assert self.finished.keys() == self.requests.keys()
        for number, request in self.requests.items():
            output = self.outputs[number]
            assert output == request.output_ids
            if request.params.beams is not None:
                continue
            variant = variant_of(request.params)
            assert output == expected_output(request.prompt_ids, len(output), self.engine.config.groups, variant), (
                number
            )
            if self.finished[number] is FinishReason.LENGTH:
                assert len(output) == request.params.max_tokens
        self._check_searches()

    def _check_searches(self) -> None:
        """Assert that each search found the results of a reference search, or that all its results failed together."""
        for group in set(self.groups.values()):
            request = group.results[0]
            ends = [self.finished[result.id] for result in group.results]
            if ends[0] in (FinishReason.ABORT, FinishReason.ERROR):
                assert set(ends) == {ends[0]}
                assert not any(self.outputs[result.id] for result in group.results)
                continue
            expected = reference_beam_search(
                request.prompt_ids, group.beams, request.params, FEW_ENDS, group.max_tokens, self.engine.config.groups
            )
            found = [(self.outputs[result.id], end) for result, end in zip(group.results, ends, strict=True)]
            assert found == [(tokens, finish) for _, tokens, finish in expected[: len(found)]]
