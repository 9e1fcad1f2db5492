"""Replies with grammars: masks, forced tokens, ends, and failures that end only their own reply."""

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engine.backends.runner import ModelRunner, Ticket
from engine.batch import Batch
from engine.config import EngineConfig
from engine.core import Engine
from engine.device import LoadedModel
from engine.draft import Draft, Source
from engine.errors import InvalidSampling
from engine.grammar import Constraint, Words
from engine.kv.cache import KVCache
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling.drawing import Logits
from engine.sampling.masks import MaskThread
from engine.sampling_params import BeamParams, SamplingParams
from engine.step import ScheduledRequest
from tests.support.kv_groups import kv_group

VOCABULARY = 77
END = 5
NO_ENDS: frozenset[int] = frozenset()


@dataclass
class Steps:
    """A grammar of fixed steps, each of which allows some tokens. A step with one token is forced. The reply ends after
    the last step.
    """

    steps: Sequence[Sequence[int]]
    fails_at: int = -1
    begun: list[bool] = field(default_factory=list)

    def start(self, *, jumps: bool) -> Constraint:
        self.begun.append(jumps)
        return Walk(self, jumps)


@dataclass
class Walk:
    grammar: Steps
    jumps: bool
    at: int = 0
    ahead: list[int] = field(default_factory=list)  # positions after the drafted runs

    @property
    def ended(self) -> bool:
        return self.at >= len(self.grammar.steps)

    def prefetch_mask(self, runs: int = 0) -> None:
        pass

    def fill(self, words: Words, runs: int = 0) -> bool:
        at = [self.at, *self.ahead][runs]
        if at == self.grammar.fails_at:
            raise RuntimeError("too complex")
        allowed = self.grammar.steps[at]
        for token_id in allowed:
            words[token_id // 32] |= torch.tensor(1 << token_id % 32).int().item()
        return bool(allowed)

    def prefetch_look_ahead(self, drafted: Sequence[int], seconds: float) -> None:
        pass

    def look_ahead(self, drafted: Sequence[int], seconds: float) -> Sequence[int]:
        self.ahead.clear()
        runs: list[int] = []
        walk = Walk(self.grammar, self.jumps, self.at)
        while (start := sum(runs)) < len(drafted):
            allowed = self.grammar.steps[walk.at]
            if allowed and drafted[start] not in allowed:
                break
            run = [drafted[start], *walk.accept(drafted[start])]
            if walk.ended or run != [*drafted[start : start + len(run)]]:
                break
            self.ahead.append(walk.at)
            runs.append(len(run))
        return runs

    def prefetch_accept(self, token_ids: Sequence[int]) -> None:
        pass

    def accept(self, token_id: int) -> Sequence[int]:
        self.ahead.clear()
        assert not self.grammar.steps[self.at] or token_id in self.grammar.steps[self.at]
        self.at += 1
        forced: list[int] = []
        while self.jumps and not self.ended and len(self.grammar.steps[self.at]) == 1:
            forced += self.grammar.steps[self.at]
            self.at += 1
        return forced


def random_engine(*, greedy: bool = False, seed: int = 0) -> Engine[Ticket]:
    """Return an engine whose logits are random, with a NaN after the prompt (13,)."""
    kv = KVCache([kv_group((0,), 1, 8)], [40])
    generator = torch.Generator().manual_seed(seed)

    def compute(batch: Batch) -> Logits:
        values = torch.randn(len(batch.logit_rows), VOCABULARY, generator=generator)
        for row, token in enumerate(batch.logit_rows):
            if (batch.positions[token], batch.token_ids[token]) == (0, 13):
                values[row, 7] = torch.nan
        best = [-1 if row.isnan().any() else int(row.argmax()) for row in values]
        return Logits(values, best if greedy else None)

    config = EngineConfig("random", 256, 40)
    return Engine(config, VOCABULARY, ModelRunner(LoadedModel(compute, kv), VOCABULARY))


def run(engine: Engine[Ticket]) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while engine.has_requests:
        events += engine.step()
    engine.assert_empty()
    return events


def tokens_of(events: Sequence[TokenEvent], request_id: int) -> list[int]:
    return [it.token_id for it in events if it.request_id == request_id and it.token_id is not None]


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_only_allowed_tokens_are_sampled(greedy: bool, temperature: float) -> None:
    engine = random_engine(greedy=greedy)
    chance = random.Random()
    # The first 20 steps allow no end token, so that the replies differ.
    steps = [
        chance.sample(range(END + 1 if step < 20 else 0, VOCABULARY), chance.choice((2, 3, 40))) for step in range(30)
    ]
    grammar = Steps([*steps, []])  # the last step allows any token
    params = SamplingParams(temperature=temperature, grammar=grammar, max_tokens=60)
    several = [engine.request((1, 2, 3), params, frozenset({END})) for _ in range(3)]
    free = engine.request((1, 2, 4), SamplingParams(max_tokens=40, ignore_eos=True), NO_ENDS)
    engine.add(*several)
    engine.add(free)
    events = run(engine)
    for request in several:
        tokens = tokens_of(events, request.id)
        assert len(tokens) == 31 or tokens[-1] == END
        assert all(token in allowed for token, allowed in zip(tokens, steps, strict=False))
    assert len(tokens_of(events, free.id)) == 40
    assert len({tuple(tokens_of(events, it.id)) for it in several}) == 3  # each reply has its own grammar state


def test_forced_tokens_are_appended_in_one_step() -> None:
    engine = random_engine()
    grammar = Steps([(10, 11), (20,), (21,), (22,), (30, 31), (40,)])
    request = engine.request((1,), SamplingParams(grammar=grammar), NO_ENDS)
    engine.add(request)
    first = engine.step()
    assert [it.token_id for it in first[1:]] == [20, 21, 22]
    second = engine.step()
    assert [it.token_id for it in second][1:] == [40]
    assert [it.finish for it in second] == [None, FinishReason.STOP]
    assert not engine.has_requests
    engine.assert_empty()


def test_logprobs_disable_forced_jumps() -> None:
    engine = random_engine()
    grammar = Steps([(10,), (20,), (30,)])
    engine.add(engine.request((1,), SamplingParams(grammar=grammar, logprobs=1), NO_ENDS))
    events = run(engine)
    assert grammar.begun == [False]
    assert [it.token_id for it in events] == [10, 20, 30]
    assert all(it.logprobs is not None for it in events)


def test_forced_tokens_respect_max_tokens() -> None:
    engine = random_engine()
    request = engine.request(
        (1,), SamplingParams(grammar=Steps([[token] for token in range(9)]), max_tokens=4), NO_ENDS
    )
    engine.add(request)
    events = run(engine)
    assert [it.token_id for it in events] == [0, 1, 2, 3]
    assert events[-1].finish is FinishReason.LENGTH


def test_failing_grammar_ends_only_its_reply() -> None:
    engine = random_engine()
    good, bad = Steps([(1, 2)] * 6), Steps([(1, 2)] * 6, fails_at=3)
    requests = [engine.request((1,), SamplingParams(grammar=grammar), NO_ENDS) for grammar in (good, bad, good)]
    for request in requests:
        engine.add(request)
    events = run(engine)
    ends = {it.request_id: it for it in events if it.finish}
    assert [ends[it.id].finish for it in requests] == [FinishReason.STOP, FinishReason.GRAMMAR, FinishReason.STOP]
    assert "too complex" in ends[requests[1].id].error
    assert [len(tokens_of(events, it.id)) for it in requests] == [6, 3, 6]


@pytest.mark.parametrize("greedy", [False, True])
def test_row_with_nan_ends_only_its_reply(greedy: bool) -> None:
    engine = random_engine(greedy=greedy)
    requests = [engine.request((last,), SamplingParams(temperature=0, max_tokens=1), NO_ENDS) for last in (1, 13, 2)]
    for request in requests:
        engine.add(request)
    ends = {it.request_id: it for it in run(engine)}
    assert [ends[it.id].finish for it in requests] == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert "NaN or infinite" in ends[requests[1].id].error


def test_grammar_may_end_the_reply_before_min_tokens() -> None:
    engine = random_engine()
    params = SamplingParams(grammar=Steps([(10, 11), (END,)]), min_tokens=5, logprobs=0)
    engine.add(engine.request((1,), params, frozenset({END})))
    events = run(engine)
    assert events[-1].token_id == END
    assert events[-1].finish is FinishReason.STOP


@dataclass
class Waiting(Walk):
    """A constraint whose mask after one drafted run waits until a step wants its masks."""

    wanted: threading.Event = field(default_factory=threading.Event)

    def fill(self, words: Words, runs: int = 0) -> bool:
        if runs == 1:
            self.wanted.wait()
        return super().fill(words, runs)


def drafting(constraint: Constraint, *drafted: int) -> ScheduledRequest:
    """Return a part of a step that verifies drafted tokens."""
    request = Request(7, (1,), SamplingParams(), output_ids=[2])
    request.constraint = constraint
    draft = Draft(Source.HISTORY, 3, drafted).in_runs(constraint.look_ahead(drafted, 60.0))
    return ScheduledRequest(request, 1, 1 + len(draft.token_ids), samples=True, draft=draft)


def test_each_drafted_run_has_a_mask() -> None:
    grammar = Steps([(3, 4), (5,), (6, 7), (8, 9), (10, 11), (12, 13)])
    masks = MaskThread(VOCABULARY)
    pending = masks.start([drafting(grammar.start(jumps=True), 3, 5, 7, 8, 50)])
    assert pending is not None
    while not pending._masks.done():
        pass  # `result` would make masks late
    found = pending.result()
    positions = [(7, 1), (7, 3), (7, 4), (7, 5)]  # token 5 is forced after token 3
    assert list(found.mask_rows) == positions
    assert not found.late
    assert [np.flatnonzero(row).tolist() for row in found.allowed_rows(positions, VOCABULARY)] == [
        [3, 4], [6, 7], [8, 9], [10, 11]
    ]  # fmt: skip


def test_masks_of_drafts_are_late_if_the_step_ends_first() -> None:
    waiting = Waiting(Steps([(1, 2)] * 9), jumps=False)
    pending = MaskThread(VOCABULARY).start([drafting(waiting, 1, 2, 1, 2)])
    assert pending is not None
    pending._is_late.set()
    waiting.wanted.set()
    found = pending.result()
    assert found.late >= {(7, 3), (7, 4), (7, 5)}
    assert (7, 1) in found.mask_rows


def test_failing_mask_of_a_draft_does_not_end_the_reply() -> None:
    pending = MaskThread(VOCABULARY).start([drafting(Steps([(1, 2)] * 9, fails_at=2).start(jumps=False), 1, 2, 1)])
    assert pending is not None
    while not pending._masks.done():
        pass
    found = pending.result()
    assert not found.problems
    assert found.late == {(7, 3), (7, 4)}
    assert list(found.mask_rows) == [(7, 1), (7, 2)]


def test_beam_search_rejects_a_grammar() -> None:
    with pytest.raises(InvalidSampling, match="grammar"):
        SamplingParams(beams=BeamParams(2), grammar=Steps([]))
