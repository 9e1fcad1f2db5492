"""Filters of the sampler: DRY penalties and XTC, compared with their definitions."""

import random
from collections.abc import Sequence

import pytest
import torch

from engine.errors import InvalidSampling
from engine.request import Request
from engine.sampling.drawing import Filters
from engine.sampling.filters import MAX_MATCH, dry_penalties, xtc_applies, xtc_logits
from engine.sampling.sampler import apply_bias, sample
from engine.sampling_params import DryParams, SamplingParams


def request(ids: Sequence[int], dry: DryParams | None, prompt: int = 1, **params: object) -> Request:
    """Return a request whose prompt is the first `prompt` ids, and whose reply is the others."""
    sampling = SamplingParams(dry=dry, **params)  # type: ignore[arg-type]
    return Request(1, tuple(ids[:prompt]), sampling, output_ids=list(ids[prompt:]))


def plain_penalties(ids: Sequence[int], dry: DryParams) -> dict[int, float]:
    """Compute DRY penalties from the definition: match the last tokens against the tokens before each earlier index."""
    ids = list(ids if dry.last_n is None else ids[max(0, len(ids) - dry.last_n) :])
    longest: dict[int, int] = {}
    for index in range(len(ids) - 1):
        length = 0
        while length < min(index + 1, MAX_MATCH) and ids[index - length] == ids[-1 - length] not in dry.breakers:
            length += 1
        follower = ids[index + 1]
        if length and length >= dry.allowed_length and follower not in dry.breakers:
            longest[follower] = max(length, longest.get(follower, 0))
    return {token: dry.multiplier * dry.base ** (n - dry.allowed_length) for token, n in longest.items()}


def test_penalties_equal_the_definition() -> None:
    found = 0
    for _ in range(300):
        ids = [random.randrange(random.choice((2, 3, 8))) for _ in range(random.randint(1, 80))]
        ids += ids[random.randrange(len(ids)) :] * random.randint(0, 2)
        breakers = frozenset(random.sample(range(8), random.randint(0, 2)))
        last_n = random.choice((None, None, 0, 1, 10, 1000))
        dry = DryParams(random.random(), random.uniform(1, 2), random.randint(0, 4), last_n, breakers)
        prompt = random.randint(0, len(ids))
        assert dry_penalties(request(ids, dry, prompt)) == plain_penalties(ids, dry)
        found += bool(plain_penalties(ids, dry))
    assert found > 30


def test_penalty_of_an_endless_repetition_is_finite() -> None:
    for dry in (DryParams(100.0, 4.0, 0), DryParams(0.8, 1.75)):
        [(token, cost)] = dry_penalties(request([7] * 500, dry)).items()
        assert (token, cost) == (7, dry.multiplier * dry.base ** (MAX_MATCH - dry.allowed_length))
        assert torch.tensor(cost).isfinite()


def test_repeated_sentence_is_penalized_by_length() -> None:
    """The text is "A B C D . A B C". After three repeated tokens, D costs the multiplier times the base."""
    ids = (1, 2, 3, 4, 9, 1, 2, 3)
    assert dry_penalties(request(ids, DryParams(0.8, 1.75, 2))) == {4: 0.8 * 1.75}
    assert dry_penalties(request(ids, DryParams(0.8, 1.75, 4))) == {}
    assert dry_penalties(request(ids, DryParams(0.8, 1.75, 2, breakers=frozenset({2})))) == {}
    assert dry_penalties(request(ids, None)) == {}


def test_dry_penalty_changes_the_sampled_token() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 2.0, 5.0], [0.0, 0.0, 0.0, 2.0, 5.0]])
    requests = [request((1, 2, 4, 1, 2), DryParams(6.0), temperature=0), request((1, 2, 4, 1, 2), None, temperature=0)]
    assert apply_bias(logits, requests).tolist() == [[0.0, 0.0, 0.0, 2.0, -1.0], [0.0, 0.0, 0.0, 2.0, 5.0]]
    assert [it.token_id for it in sample(logits, requests)] == [3, 4]


@pytest.mark.parametrize(
    "params", [{"multiplier": -1.0}, {"base": 0.5}, {"base": float("nan")}, {"allowed_length": -1}]
)
def test_error_names_invalid_dry_parameters(params: dict[str, float]) -> None:
    with pytest.raises(InvalidSampling, match=next(iter(params))):
        DryParams(**{"multiplier": 1.0, **params})  # type: ignore[arg-type]


VOCABULARY = 12


def params(**given: object) -> SamplingParams:
    return SamplingParams(**{"xtc_probability": 1.0, "seed": 5, **given})  # type: ignore[arg-type]


def plainly_left(logits: list[float], wanted: SamplingParams) -> set[int]:
    """Return the tokens that the filters and XTC keep, by their definitions."""
    weights = torch.softmax(torch.tensor(logits, dtype=torch.float64) / wanted.temperature, -1).tolist()
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = [token for token in order if weights[token] >= wanted.min_p * weights[order[0]]]
    order = order[: wanted.top_k or len(order)]
    total, before = sum(weights[token] for token in order), 0.0
    kept: list[int] = []
    for token in order:
        if before / total < wanted.top_p or not kept:
            kept.append(token)
        before += weights[token]
    total = sum(weights[token] for token in kept)
    likely = sum(weights[token] / total >= wanted.xtc_threshold for token in kept)
    return set(kept[max(0, likely - 1) :])


def test_xtc_equals_its_definition() -> None:
    wanted = [
        params(
            temperature=random.choice((0.5, 1.0, 2.0)),
            top_k=random.choice((0, 0, 3, 100)),
            top_p=random.choice((1.0, 0.97, 0.5)),
            min_p=random.choice((0.0, 0.05, 0.5)),
            xtc_threshold=random.choice((0.0, 0.03, 0.1, 0.3, 0.5, 1.0)),
        )
        for _ in range(200)
    ]
    logits = torch.randn(len(wanted), VOCABULARY)
    thresholds = torch.tensor([[it.xtc_threshold] for it in wanted])
    left = xtc_logits(logits, Filters.of(wanted, VOCABULARY), thresholds)
    for row, it in enumerate(wanted):
        assert set((left[row] > -torch.inf).nonzero().flatten().tolist()) == plainly_left(logits[row].tolist(), it)
        assert torch.equal(torch.where(left[row] > -torch.inf, logits[row], -torch.inf), left[row])


def test_xtc_applies_only_to_its_rows_of_a_batch() -> None:
    logits = torch.tensor([4.0, 4.0, 3.5, 1.0, 0.0])
    several = [params(seed=seed, xtc_threshold=0.2) for seed in range(300)]
    requests = [Request(row, (1,), it) for row, it in enumerate(several)]
    requests += [Request(0, (1,), SamplingParams(temperature=0)), Request(0, (1,), SamplingParams(seed=1, top_k=1))]
    drawn = [token.token_id for token in sample(logits.repeat(len(requests), 1), requests)]
    assert drawn[-2:] == [0, 0]
    assert set(drawn[:-2]) == {2, 3, 4}


def test_xtc_applies_with_its_probability_and_depends_on_the_seed() -> None:
    hits = [xtc_applies(params(xtc_probability=0.3, seed=7), index) for index in range(4000)]
    assert hits == [xtc_applies(params(xtc_probability=0.3, seed=7), index) for index in range(4000)]
    assert abs(sum(hits) / len(hits) - 0.3) < 0.04
    assert hits != [xtc_applies(params(xtc_probability=0.3, seed=8), index) for index in range(4000)]


def test_xtc_is_off_at_temperature_zero_and_high_thresholds() -> None:
    for given in ({"temperature": 0}, {"xtc_probability": 0.0}, {"xtc_threshold": 0.51}):
        assert not any(xtc_applies(params(**given), index) for index in range(100))
