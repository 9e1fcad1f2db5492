"""XTC against its definition in plain Python, and how often it happens."""

import random

import torch

from engine.drawing import Filters
from engine.request import Request, SamplingParams
from engine.sampler import sample
from engine.xtc import leaves_out, without_top_choices

VOCABULARY = 12


def params(**given: object) -> SamplingParams:
    return SamplingParams(**{"xtc_probability": 1.0, "seed": 5, **given})  # type: ignore[arg-type]


def plainly_left(logits: list[float], wanted: SamplingParams) -> set[int]:
    """What the filters keep, in order, without all but the last of those that are likely enough."""
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


def test_what_is_left_is_what_the_definition_leaves() -> None:
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
    left = without_top_choices(logits, Filters.of(wanted, VOCABULARY), thresholds)
    for row, it in enumerate(wanted):
        assert set((left[row] > -torch.inf).nonzero().flatten().tolist()) == plainly_left(logits[row].tolist(), it)
        assert torch.equal(torch.where(left[row] > -torch.inf, logits[row], -torch.inf), left[row])


def test_tokens_are_drawn_from_what_is_left_beside_rows_that_keep_all() -> None:
    logits = torch.tensor([4.0, 4.0, 3.5, 1.0, 0.0])
    several = [params(seed=seed, xtc_threshold=0.2) for seed in range(300)]
    requests = [Request(row, (1,), it) for row, it in enumerate(several)]
    requests += [Request(0, (1,), SamplingParams(temperature=0)), Request(0, (1,), SamplingParams(seed=1, top_k=1))]
    drawn = [token.token_id for token in sample(logits.repeat(len(requests), 1), requests)]
    assert drawn[-2:] == [0, 0]
    assert set(drawn[:-2]) == {2, 3, 4}


def test_chance_is_as_often_as_told_and_the_same_for_the_same_seed() -> None:
    hits = [leaves_out(params(xtc_probability=0.3, seed=7), index) for index in range(4000)]
    assert hits == [leaves_out(params(xtc_probability=0.3, seed=7), index) for index in range(4000)]
    assert abs(sum(hits) / len(hits) - 0.3) < 0.04
    assert hits != [leaves_out(params(xtc_probability=0.3, seed=8), index) for index in range(4000)]


def test_it_never_happens_where_it_means_nothing() -> None:
    for given in ({"temperature": 0}, {"xtc_probability": 0.0}, {"xtc_threshold": 0.51}):
        assert not any(leaves_out(params(**given), index) for index in range(100))
