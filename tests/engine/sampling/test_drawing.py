from collections import Counter

import pytest
import torch
from torch import Tensor

from engine.sampling.drawing import ATTEMPTS, NO_TOKEN, PREFIXES, Filters, draw, draw_among, most_likely
from engine.sampling_params import SamplingParams

VOCABULARY = 5000
FILTERS = [
    {},
    {"temperature": 0.3},
    {"top_k": 40, "top_p": 0.95},
    {"top_k": 900, "min_p": 0.01},
    {"top_k": 3000, "top_p": 0.9},
    {"top_p": 0.9},
    {"min_p": 0.02},
    {"temperature": 2.0, "top_p": 0.5, "min_p": 0.001},
]


def numbers(rows: int, generator: torch.Generator) -> Tensor:
    return torch.rand(rows, ATTEMPTS, dtype=torch.float64, generator=generator)


def spread_numbers(count: int, generator: torch.Generator) -> Tensor:
    """Return uniform numbers. The first ones of the rows are in `count` different parts of [0, 1), to reduce the
    variance.
    """
    out = numbers(count, generator)
    out[:, 0] = (torch.randperm(count, generator=generator) + out[:, 0]) / count
    return out


def filters_of(params: dict[str, float], rows: int) -> Filters:
    return Filters.of([SamplingParams(**params)] * rows, VOCABULARY)  # type: ignore[arg-type]


def kept(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the filtered distribution by its definition; float64 [vocabulary]."""
    probabilities = torch.softmax(logits.double() / params.temperature, -1)
    order = sorted(range(VOCABULARY), key=lambda token_id: (-float(logits[token_id]), token_id))
    order = order[: params.top_k or VOCABULARY]
    order = [i for i in order if probabilities[i] >= params.min_p * probabilities[order[0]]]
    total, before, out = float(probabilities[order].sum()), 0.0, torch.zeros(VOCABULARY, dtype=torch.float64)
    for token_id in order:
        if before / total >= params.top_p and before:
            break
        out[token_id] = probabilities[token_id]
        before += float(probabilities[token_id])
    return out / out.sum()


@pytest.mark.share(1, "spread")
@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.5, 4.0], ids=["flat", "steep"])
def test_draws_follow_the_filtered_distribution(params: dict[str, float], spread: float) -> None:
    """1,000 draws: none is a dropped token, and 20 parts of the distribution are hit with their probabilities."""
    generator = torch.Generator().manual_seed(5)
    # rounded to eighths, so that there are ties
    logits = (torch.randn(VOCABULARY, generator=generator) * spread).mul(8).round() / 8
    expected = kept(logits, SamplingParams(**params))  # type: ignore[arg-type]
    count = 1000
    rows = spread_numbers(count, generator).view(-1, 50, ATTEMPTS)
    drawn = torch.cat([draw(logits.repeat(50, 1), filters_of(params, 50), uniforms) for uniforms in rows])
    assert (expected[drawn] > 0).all()
    cumulative = expected.cumsum(0)
    part = ((cumulative - expected / 2) * 20).long().clamp(max=19)
    found = torch.bincount(part[drawn], minlength=20) / count
    due = torch.bincount(part, weights=expected, minlength=20)
    assert (found - due).abs().max() < 0.02


@pytest.mark.parametrize("params", FILTERS[2:], ids=str)
def test_draws_from_a_prefix_equal_those_from_the_vocabulary(params: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(6)
    logits = (torch.randn(200, VOCABULARY, generator=generator) * 3).mul(8).round() / 8
    uniforms, filters = numbers(200, generator)[:, :1], filters_of(params, 200)
    whole = draw_among(logits, filters, uniforms, VOCABULARY)
    assert (whole != NO_TOKEN).all()
    for prefix in PREFIXES:
        tokens = draw_among(logits, filters, uniforms, prefix)
        told = tokens != NO_TOKEN
        assert torch.equal(tokens[told], whole[told])


@pytest.mark.parametrize("params", FILTERS[2:], ids=str)
@pytest.mark.parametrize("possible", [1, 5, 63, 64, 65])
def test_prefix_suffices_if_it_has_all_possible_tokens(params: dict[str, float], possible: int) -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.full((50, VOCABULARY), -torch.inf)
    ids = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:possible] for _ in logits])
    logits.scatter_(-1, ids, torch.randn(50, possible, generator=generator))
    uniforms, filters = numbers(50, generator)[:, :1], filters_of(params, 50)
    found, whole = (draw_among(logits, filters, uniforms, prefix) for prefix in (PREFIXES[0], VOCABULARY))
    assert possible >= PREFIXES[0] or (found != NO_TOKEN).all()
    assert torch.equal(found[found != NO_TOKEN], whole[found != NO_TOKEN])


@pytest.mark.parametrize("size", [65, 127, 128, 1025, 4097, 9999])
def test_prefixes_contain_the_most_likely_tokens(size: int) -> None:
    """The logits have many ties and some impossible tokens. Each token occurs once."""
    logits = (torch.randn(20, size) * 2).round() / 2
    logits[logits < -1] = -torch.inf
    for prefix in (p for p in PREFIXES if p < size):
        values, ids = most_likely(logits, prefix)
        assert torch.equal(values, logits.sort(-1, descending=True).values[:, :prefix])
        assert torch.equal(values, logits.gather(-1, ids))
        assert all(len(set(row)) == prefix for row in ids.tolist())


def test_top_k_of_equal_logits_keeps_the_lowest_ids() -> None:
    """A partial selection does not guarantee the lowest ids among equal logits."""
    logits, generator = torch.zeros(300, VOCABULARY), torch.Generator().manual_seed(7)
    drawn = Counter(draw(logits, filters_of({"top_k": 3}, 300), numbers(300, generator)).tolist())
    assert set(drawn) == {0, 1, 2}


def test_impossible_tokens_are_never_drawn() -> None:
    """Numbers close to 1 select the last possible token, not the last token of the vocabulary."""
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, 7], logits[0, 9] = 1.0, 1.0
    for params in FILTERS:
        edge = torch.full((1, ATTEMPTS), 1 - 2**-53, dtype=torch.float64)
        assert int(draw(logits, filters_of(params, 1), edge)) in (7, 9)


def test_draw_of_a_row_does_not_depend_on_other_rows() -> None:
    generator = torch.Generator().manual_seed(8)
    params = [SamplingParams(**FILTERS[row % len(FILTERS)]) for row in range(24)]  # type: ignore[arg-type]
    logits, uniforms = torch.randn(24, VOCABULARY, generator=generator) * 2, numbers(24, generator)
    together = draw(logits, Filters.of(params, VOCABULARY), uniforms).tolist()
    alone = [
        int(draw(logits[row : row + 1], Filters.of([params[row]], VOCABULARY), uniforms[row : row + 1]))
        for row in range(24)
    ]
    assert together == alone
