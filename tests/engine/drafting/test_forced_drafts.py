"""Drafts of any quality never change a reply: forced drafts over the hash model, which reveals every wrong token.

The full run is `pytest tests/engine/drafting/test_forced_drafts.py --requests 100000`.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from engine.config import Preemption
from engine.core import Engine
from engine.draft import NO_DRAFTS, Draft, Source
from engine.drafting.drafter import Drafter
from engine.drafting.plan import Room
from engine.grammar import Words
from engine.request import Origin, Request, ServiceClass
from engine.sampling_params import SamplingParams
from tests.engine.drafting.forced_replies import replies, replies_with_forced_drafts, without_drafts
from tests.engine.hash_run import Run
from tests.engine.test_hash_model import GROUPS, Load
from tests.support.hash_model import HashTicket, expected_output, hash_engine, variant_of

QUALITIES = ("right", "wrong", "mixed")


@dataclass
class ForcedDrafts(Drafter):
    """Drafts up to 15 tokens for every request: the true ones, wrong ones, or some of both."""

    quality: str
    random: random.Random
    engine: Engine[HashTicket]
    given: dict[int, int] = field(default_factory=dict)  # request id -> number of tokens drafted

    def __post_init__(self) -> None:
        super().__init__(lambda tokens: 1.0)

    def has_drafts(self, requests: Iterable[Request]) -> bool:
        return True

    def expects_draft(self, request: Request) -> bool:
        return True

    def choose(self, requests: Sequence[Request], room: Room) -> dict[int, Draft]:
        drafts, most = {}, room.most
        for request in requests:
            count = min(most, self.random.randrange(0, 16))
            most -= count
            tokens = tuple(self._token(request, offset) for offset in range(count))
            drafts[request.id] = Draft(Source.HISTORY, 3, tokens)
        return drafts

    def _token(self, request: Request, offset: int) -> int:
        groups, variant = self.engine.config.groups, variant_of(request.params)
        index = len(request.output_ids) + offset
        right = expected_output(request.prompt_ids, index + 1, groups, variant)[index]
        if self.quality == "right" or (self.quality == "mixed" and self.random.random() < 0.8):
            return right
        return (right + 1) % self.engine.vocab_size


def forced_engine(quality: str, seed: int, **options: object) -> Engine[HashTicket]:
    engine, _ = hash_engine(seed=seed, drafts=True, **options)  # type: ignore[arg-type]
    engine._scheduler._verification.drafter = ForcedDrafts(quality, random.Random(seed), engine)
    return engine


@pytest.mark.share(1, "quality")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", Preemption)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("quality", QUALITIES)
def test_forced_drafts_give_no_wrong_token(
    quality: str, groups: str, preemption: Preemption, depth: int, requests: int
) -> None:
    """Random load with families, aborts, preemption, and copies that end late or fail."""
    rng = random.Random(f"{quality} {groups} {preemption} {depth}")
    engine = forced_engine(
        quality, rng.randrange(1 << 30), num_blocks=40, depth=depth, budget=96, groups=GROUPS[groups], host_blocks=20,
        preemption=preemption, failing_moves=0.05,
    )  # fmt: skip
    run, load = Run(engine), Load(rng)
    while len(run.requests) < requests // 30:
        for prompt in load.arrivals():
            origin = Origin(rng.choice(list(ServiceClass)), rng.randrange(-100, 101))
            count = rng.choice([1, 1, 1, 2, 5])
            run.submit(prompt, origin, count, max_tokens=rng.randrange(1, 60), ignore_eos=rng.random() < 0.8)
        if rng.random() < 0.1:
            run.abort(rng.randrange(1, len(run.requests) + 2))
        run.step()
    run.run_out()
    run.check()
    counts = engine.state().counters.drafts[Source.HISTORY]
    assert counts == sum((request.drafts for request in run.requests.values()), NO_DRAFTS)
    assert counts.drafted > (100 if depth == 1 else 5)  # at depth 2, a step is usually under way
    assert (counts.accepted > 0) == (quality != "wrong")
    assert counts.accepted <= counts.drafted


@pytest.mark.parametrize("groups", GROUPS)
def test_right_drafts_need_fewer_steps(groups: str) -> None:
    steps = []
    for quality in ("right", "wrong"):
        run = Run(forced_engine(quality, 7, groups=GROUPS[groups]))
        run.submit((1, 2, 3), max_tokens=200, ignore_eos=True)
        run.run_out()
        run.check()
        steps.append(run.engine.progress)
    assert steps[0] * 4 < steps[1]


def test_tokens_after_an_end_token_are_dropped() -> None:
    """The reply ends at its end token, although the drafts after it are right."""
    for prompt in range(200, 260):
        run = Run(forced_engine("right", prompt))
        run.submit((prompt,), max_tokens=150)
        run.run_out()
        run.check()


@dataclass
class Forcing:
    """A grammar that allows every token, and forces two tokens after each third one. Implements `Grammar`."""

    ended = False

    def start(self, *, jumps: bool) -> "Forcing":
        return Forcing()

    def prefetch_mask(self, runs: int = 0) -> None:
        pass

    def fill(self, words: Words, runs: int = 0) -> bool:
        return False

    def prefetch_look_ahead(self, drafted: Sequence[int], seconds: float) -> None:
        pass

    def look_ahead(self, drafted: Sequence[int], seconds: float) -> Sequence[int]:
        runs: list[int] = []
        while (start := sum(runs)) < len(drafted):
            run = [drafted[start], *self.accept(drafted[start])]
            if run != [*drafted[start : start + len(run)]]:
                break
            runs.append(len(run))
        return runs

    def prefetch_accept(self, token_ids: Sequence[int]) -> None:
        pass

    def accept(self, token_id: int) -> Sequence[int]:
        return (token_id // 2, token_id // 3) if token_id % 3 == 0 else ()


@pytest.mark.parametrize("right", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("groups", GROUPS)
def test_forced_tokens_and_drafts_give_no_wrong_token(groups: str, right: float) -> None:
    """A token that is computed after a wrong draft, and then forced, would change the tokens after it."""
    engine, _ = hash_engine(seed=3, drafts=True, groups=GROUPS[groups])
    prompt = tuple(range(300, 340))
    several = [SamplingParams(max_tokens=80, top_k=1, seed=seed, grammar=Forcing()) for seed in range(1, 5)]
    plain = replies(engine, prompt, [without_drafts(it) for it in several], end=4)
    found, counts = replies_with_forced_drafts(engine, prompt, several, plain, right, random.Random(right), end=4)
    assert found == plain
    assert counts.accepted > 20
