"""A reply is the same with drafts and without: tokens and log-probabilities, on real backends with every sampler."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine.draft import NO_DRAFTS, Draft, DraftCounts, Source
from engine.drafting.drafter import Drafter
from engine.drafting.plan import Room
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.request import Request, TokenEvent, TokenLogprobs
from engine.sampling_params import DryParams, SamplingParams
from tests.engine.models.tiny_llama import make

LENGTH = 40  # tokens of a reply
DRAWN: dict[str, object] = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
CASES: Mapping[str, Mapping[str, object]] = {
    "greedy": {"temperature": 0},
    "unfiltered": {"temperature": 0.9, "seed": 5},
    "top-p": DRAWN,
    "top-k and min-p": {"temperature": 1.1, "top_k": 12, "min_p": 0.02, "seed": 3},
    "penalties": DRAWN | {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "dry": {"temperature": 0, "dry": DryParams(2.0)},
    "xtc": DRAWN | {"xtc_probability": 0.6, "xtc_threshold": 0.05},
    "min tokens": {"temperature": 0, "min_tokens": 30},
    "bias": DRAWN | {"logit_bias": ((5, 4.0), (9, -100.0))},
    "log-probabilities": {"temperature": 0, "logprobs": 20},
    "drawn log-probabilities": DRAWN | {"logprobs": 5, "drawn_logprobs": True},
    "prompt log-probabilities": DRAWN | {"logprobs": 2, "prompt_logprobs": 2},
}

Reply = tuple[list[int], list[TokenLogprobs | None]]


@dataclass
class ForcedDrafts(Drafter):
    """Drafts of known quality: each token is the next one of the `replies` with the chance `right`."""

    replies: Mapping[tuple[int, ...], Sequence[Sequence[int]]]  # prompt -> replies that it gets
    right: float
    random: random.Random

    def __post_init__(self) -> None:
        super().__init__(lambda tokens: 1.0)

    def choose(self, requests: Sequence[Request], room: Room) -> dict[int, Draft]:
        return {request.id: Draft(Source.HISTORY, 3, self._tokens(request)) for request in requests}

    def _tokens(self, request: Request) -> tuple[int, ...]:
        known = request.output_ids
        reply = next(it for it in self.replies[request.prompt_ids] if list(it[: len(known)]) == known)
        coming = reply[len(known) : len(known) + self.random.randrange(1, 9)]
        return tuple(it if self.random.random() < self.right else (it + 1) % 97 for it in coming)


def replies(engine: ModelEngine, prompt: tuple[int, ...], several: Sequence[SamplingParams]) -> list[Reply]:
    """Return the reply with each of the parameters. Prompts are shared, as by several choices of one request."""
    requests = [engine.request(prompt, params, frozenset({3})) for params in several]
    engine.add(*requests)
    found: dict[int, list[TokenEvent]] = {request.id: [] for request in requests}
    while engine.has_requests:
        for event in engine.step():
            found[event.request_id].append(event)
    engine.assert_empty()
    return [
        ([it.token_id for it in events if it.token_id is not None], [it.logprobs for it in events])
        for events in found.values()
    ]


@pytest.fixture(scope="module")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny"), head_dim=32, hidden=64).path


@pytest.fixture(scope="module")
def engines(checkpoint_path: Path, cpu_kernels: Path) -> Callable[[str], ModelEngine]:
    loaded: dict[str, ModelEngine] = {}

    def engine(backend: str) -> ModelEngine:
        if backend not in loaded:
            with open_checkpoint(checkpoint_path) as checkpoint:
                loaded[backend] = load_engine(checkpoint, LoadOptions(backend=backend, code_cache=cpu_kernels))
        return loaded[backend]

    return engine


@pytest.mark.share(1, "case", "backend")
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_reply_is_the_same_with_drafts(
    engines: Callable[[str], ModelEngine], case: str, backend: str, right: float
) -> None:
    engine, rng = engines(backend), random.Random(f"{case} {right}")
    drafter = engine._scheduler._verification.drafter
    prompt = tuple(rng.randrange(4, 97) for _ in range(rng.randrange(1, 40)))
    count = 1 if "prompt_logprobs" in CASES[case] else 3
    seeds = [{"seed": seed} if CASES[case]["temperature"] else {} for seed in range(count)]
    several = [SamplingParams(max_tokens=LENGTH, **{**CASES[case], **seed}) for seed in seeds]  # type: ignore[arg-type]
    plain = replies(engine, prompt, [_without_drafts(it) for it in several])
    before = _drafted(engine)
    engine._scheduler._verification.drafter = ForcedDrafts({prompt: [ids for ids, _ in plain]}, right, rng)
    try:
        assert replies(engine, prompt, several) == plain
    finally:
        engine._scheduler._verification.drafter = drafter
    counts = DraftCounts(_drafted(engine).drafted - before.drafted, _drafted(engine).accepted - before.accepted)
    if any(len(ids) > 2 for ids, _ in plain):
        assert counts.drafted > 0
        assert (counts.accepted > 0) == (right > 0)


def _without_drafts(params: SamplingParams) -> SamplingParams:
    return replace(params, drafts=False)


def _drafted(engine: ModelEngine) -> DraftCounts:
    return sum(engine.state().counters.drafts.values(), NO_DRAFTS)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_drafts_from_earlier_text_are_accepted_in_a_repeating_reply(
    engines: Callable[[str], ModelEngine], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter itself: a bias makes the model repeat one token, which drafts foresee."""
    engine = engines(backend)
    drafter = engine._scheduler._verification.drafter
    monkeypatch.setattr(drafter, "_seconds", lambda tokens: 1.0)  # independent of measured times
    params = SamplingParams(temperature=0, max_tokens=60, logit_bias=((11, 100.0),))
    before = _drafted(engine)
    [(ids, _)] = replies(engine, (4, 5, 6), [params])
    assert ids == [11] * 60
    assert _drafted(engine).accepted - before.accepted > 20
