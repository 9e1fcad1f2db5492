"""A reply is the same with drafts and without: tokens and log-probabilities, on real backends with every sampler."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.sampling_params import DryParams, SamplingParams
from tests.engine.drafting.forced_replies import drafted, replies, replies_with_forced_drafts, without_drafts
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


@pytest.mark.share(1, "case")
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_reply_is_the_same_with_drafts(
    engines: Callable[[str], ModelEngine], case: str, backend: str, right: float
) -> None:
    engine, rng = engines(backend), random.Random(f"{case} {right}")
    prompt = tuple(rng.randrange(4, 97) for _ in range(rng.randrange(1, 40)))
    count = 1 if "prompt_logprobs" in CASES[case] else 3
    seeds = [{"seed": seed} if CASES[case]["temperature"] else {} for seed in range(count)]
    several = [SamplingParams(max_tokens=LENGTH, **{**CASES[case], **seed}) for seed in seeds]  # type: ignore[arg-type]
    plain = replies(engine, prompt, [without_drafts(it) for it in several])
    found, counts = replies_with_forced_drafts(engine, prompt, several, plain, right, rng)
    assert found == plain
    if any(len(it.token_ids) > 2 for it in plain):
        assert counts.drafted > 0
        assert (counts.accepted > 0) == (right > 0)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_drafts_from_earlier_text_are_accepted_in_a_repeating_reply(
    engines: Callable[[str], ModelEngine], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter itself: a bias makes the model repeat one token, which drafts foresee."""
    engine = engines(backend)
    drafter = engine._scheduler._verification.drafter
    monkeypatch.setattr(drafter, "_seconds", lambda tokens: 1.0)  # independent of measured times
    params = SamplingParams(temperature=0, max_tokens=60, logit_bias=((11, 100.0),))
    before = drafted(engine)
    [reply] = replies(engine, (4, 5, 6), [params])
    assert reply.token_ids == [11] * 60
    assert drafted(engine).accepted - before.accepted > 20
