"""The sampling kernels against the host's sampler."""

import math
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import sampling
from engine.kernels.chunk_passes import BLOCK
from engine.kernels.logit_edits import edited_logits
from engine.kernels.sampling_rows import (
    NOT_A_NUMBER,
    Sampled,
    SampleTarget,
    SamplingRows,
    build_rows,
    to_sampled_tokens,
)
from engine.kernels.step_logits import StepLogits
from engine.request import Request
from engine.sampling.drawing import ATTEMPTS, Filters
from engine.sampling.drawing import draw as draw_on_host
from engine.sampling.masks import Masks
from engine.sampling.sampler import NOT_NUMBERS, apply_bias, apply_penalties, forbid_early_end, masked, uniform
from engine.sampling.sampler import sample as sample_on_host
from engine.sampling_params import DryParams, SamplingParams

pytestmark = pytest.mark.usefixtures("fenced_memory")

Params = Mapping[str, object]
FILTERS: tuple[Params, ...] = (
    {},
    {"temperature": 0.3, "min_p": 0.05},
    {"top_k": 40, "top_p": 0.95},
    {"top_k": 1, "temperature": 2.0},
    {"top_k": 300, "min_p": 0.01},
    {"top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.5, "min_p": 0.001},
    {"top_p": 0.0},
    {"top_k": 7, "top_p": 0.4, "min_p": 0.3, "temperature": 0.7},
)
# no multiple of a chunk except for the last one; the chunks of the one before are twice as large
LARGE = (32000, 128256, 248320, 262208, 262144)
# distance relative to the total weight; if a number is this close to a boundary, float32 may choose either token
CLOSE = 3e-6


def random_params() -> Params:
    return {
        "temperature": random.choice([0.01, 0.5, 1.0, 2.0]),
        "top_k": random.choice([0, 0, 2, 20, 64, 65]),
        "top_p": random.choice([1.0, 0.99, 0.7, 0.1]),
        "min_p": random.choice([0.0, 0.0, 0.1, 1.0]),
    }


def targets_of(params: Sequence[Params], **of_requests: object) -> list[SampleTarget]:
    """Return sampling targets: row r of the logits is sampled with params[r]."""
    targets = []
    for row, it in enumerate(params):
        sampling_params = SamplingParams(**{"seed": random.getrandbits(60), **it})  # type: ignore[arg-type]
        request = Request(row, (0, 3), sampling_params, **of_requests)  # type: ignore[arg-type]
        targets.append(SampleTarget(row, request, len(request.output_ids)))
    return targets


def run(logits: Tensor, rows: SamplingRows, device: torch.device) -> Sampled:
    """Sample on the device, and copy the result back in one transfer."""
    sampled = sampling.sample(StepLogits.of(logits.to(device)), rows.to(device))
    return sampled.over(sampled.buffer.cpu())


def tokens_of(logits: Tensor, targets: Sequence[SampleTarget], device: torch.device) -> list[int]:
    return run(logits, build_rows(targets, logits.shape[1]), device).columns.token_ids.tolist()


def with_ties(rows: int, vocabulary: int, spread: float) -> Tensor:
    return (torch.randn(rows, vocabulary) * spread).mul(8).round() / 8


def assert_same(logits: Tensor, params: Sequence[Params], uniforms: Tensor, tokens: Sequence[int]) -> None:
    """Check that each token equals the host's token, for the same number or for one within rounding."""
    for row, token in enumerate(tokens):
        found = set()
        for nudge, bound in [(a, b) for b in (0, 1, -1) for a in (0, 1, -1)]:
            wanted = SamplingParams(**params[row])  # type: ignore[arg-type]
            filters = Filters.of([wanted], logits.shape[1])
            filters.top_p.add_(bound * CLOSE if wanted.top_p < 1 else 0)
            numbers = (uniforms[row : row + 1] + nudge * CLOSE).clamp(0, 1 - 2**-53)
            found.add(int(draw_on_host(logits[row : row + 1], filters, numbers)))
            if token in found:
                break
        assert token in found, (params[row], token, found)


def assert_same_as_sampler(logits: Tensor, requests: Sequence[Request], tokens: Sequence[int]) -> None:
    """Check that each token equals that of the host's sampler, for the same number or for one within rounding."""
    found: list[list[int | None]] = []
    for nudge in (0.0, CLOSE, -CLOSE):

        def nudged(seed: int, index: int, attempt: int = 0, nudge: float = nudge) -> float:
            return min(max(uniform(seed, index, attempt) + nudge, 0.0), 1 - 2**-53)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.sampling.sampler.uniform", nudged)
            found.append([it.token_id for it in sample_on_host(logits, requests)])
    for request, token, wanted in zip(requests, tokens, zip(*found, strict=True), strict=True):
        assert token in wanted, (request.params, token, wanted)


@pytest.mark.parametrize("vocabulary", [7, 100, 5000])
def test_tokens_equal_the_host_for_the_same_uniform_numbers(vocabulary: int, device: torch.device) -> None:
    params = [*FILTERS, *(random_params() for _ in range(4))]
    steep = torch.tensor([random.choice([0.1, 0.5, 4.0]) for _ in params])
    logits, targets = with_ties(len(params), vocabulary, 1.0) * steep[:, None], targets_of(params)
    rows = build_rows(targets, vocabulary)
    assert_same(logits, params, rows.columns.uniforms, run(logits, rows, device).columns.token_ids.tolist())


@pytest.mark.share(2)
@pytest.mark.parametrize("vocabulary", LARGE)
def test_sampling_from_a_large_vocabulary_equals_the_host(vocabulary: int, device: torch.device) -> None:
    params = [{}, {"top_k": 40, "top_p": 0.95}, {"top_p": 0.8}, {"temperature": 1.5, "top_p": 0.6}, random_params()]
    logits, targets = torch.randn(len(params), vocabulary) * 3, targets_of(params)
    rows = build_rows(targets, vocabulary)
    assert_same(logits, params, rows.columns.uniforms, run(logits, rows, device).columns.token_ids.tolist())


@pytest.mark.parametrize("vocabulary", LARGE)
def test_lowest_id_wins_ties_across_chunks(vocabulary: int, device: torch.device) -> None:
    """With top-k 1 as with greedy sampling, wherever the equal logits are."""
    logits = torch.randn(4, vocabulary)
    borders = range(BLOCK, vocabulary, BLOCK)
    places = [it for border in borders for it in (border - 1, border)] + [vocabulary - 1]
    firsts = []
    for row in logits:
        ties = sorted(random.sample(places, random.randint(2, min(6, len(places)))))
        row[ties] = 8.0
        firsts.append(ties[0])
    assert StepLogits.of(logits.to(device)).tokens.tolist() == firsts
    assert tokens_of(logits, targets_of([{"temperature": 0}, {"top_k": 1}] * 2), device) == firsts


def test_tokens_dropped_by_top_p_are_drawn_again(device: torch.device) -> None:
    """The 300 nearly equal tokens do not fit into a prefix. If all attempts fail, the kernel finds the token by
    bisection.
    """
    logits = 0.01 * torch.randn(1, 300)
    params: list[Params] = [{"top_p": 0.5}] * 5
    order = logits[0].argsort(descending=True)
    unlikely, likely = sorted(order[200:].tolist()), int(order[20])
    numbers = torch.rand(5, ATTEMPTS, dtype=torch.float64)
    cumulative = torch.softmax(logits[0].double(), -1).cumsum(0)
    numbers[:4] = cumulative[unlikely[: 4 * ATTEMPTS]].view(4, ATTEMPTS) - 1e-4
    for row in range(1, 4):
        numbers[row, row] = cumulative[likely] - 1e-4
    rows = build_rows([SampleTarget(0, target.request, 0) for target in targets_of(params)], 300)
    rows.columns.uniforms.copy_(numbers)
    tokens = run(logits, rows, device).columns.token_ids.tolist()
    assert tokens[1:4] == [likely] * 3
    assert_same(logits.repeat(5, 1), params, numbers, tokens)


@pytest.mark.parametrize("params", [FILTERS[at] for at in (0, 1, 2, 4, 8)], ids=str)
def test_each_token_has_an_interval_of_its_probability(params: Params, device: torch.device) -> None:
    """Uniform numbers from 0 to 1 select the tokens in order, each for an interval as long as its probability."""
    logits, wanted = torch.randn(1, 11), SamplingParams(**params)  # type: ignore[arg-type]
    probabilities = torch.softmax(logits[0].double() / wanted.temperature, -1)
    order = probabilities.argsort(descending=True).tolist()
    order = [i for i in order[: wanted.top_k or 11] if probabilities[i] >= wanted.min_p * probabilities.max()]
    before = (probabilities[order].cumsum(0) - probabilities[order]) / probabilities[order].sum()
    order = [i for i, it in zip(order, before, strict=True) if it < wanted.top_p]
    order = sorted(order) if wanted.top_p == 1 and not 0 < wanted.top_k < 11 else order
    edges = probabilities[order].cumsum(0) / probabilities[order].sum()
    grid = (torch.arange(10, dtype=torch.float64) + 0.5) / 10
    rows = build_rows([SampleTarget(0, target.request, 0) for target in targets_of([params] * 10)], 11)
    rows.columns.uniforms.copy_(grid[:, None].expand(10, ATTEMPTS))
    got = run(logits, rows, device).columns.token_ids.tolist()
    for number, token in zip(grid, got, strict=True):
        near = {order[int((edges <= number + nudge).sum())] for nudge in (-CLOSE, 0, CLOSE)}
        assert token in near


def test_ties_beyond_the_shortlist_keep_the_lowest_ids(device: torch.device) -> None:
    """All tokens of the row are equally likely."""
    params: list[Params] = [{"top_k": 3}, {"top_k": 2, "top_p": 0.4}, {"logprobs": 2, "temperature": 0}]
    found = to_sampled_tokens(
        run(torch.zeros(3, 5000), build_rows(targets := targets_of(params), 5000), device), targets
    )
    assert found[0].token_id in (0, 1, 2)
    assert found[1].token_id == found[2].token_id == 0
    assert found[2].logprobs
    assert [token_id for token_id, _ in found[2].logprobs.top] == [0, 1]


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "top_k": 5}, {"temperature": 1, "top_p": 0.9}],
    ids=str,
)
def test_nan_row_is_reported_and_affects_no_other_row(params: Params, device: torch.device) -> None:
    logits = torch.full((5, 5000), -torch.inf)
    logits[0, 4500] = 1.0  # the only possible token
    logits[1] = torch.randn(5000)
    logits[1, 4999] = -torch.nan if params["temperature"] else torch.nan
    logits[2, 4097] = torch.inf
    logits[4, 4096:4098] = 0.0
    got = tokens_of(logits, targets_of([params] * 5), device)
    if not params["temperature"]:
        assert StepLogits.of(logits.to(device)).tokens.tolist() == got
    assert got[:4] == [4500, NOT_A_NUMBER, 4097, 0]
    assert got[4] in (4096, 4097)


def test_sampled_token_depends_only_on_its_row(device: torch.device) -> None:
    params = FILTERS[:7]
    logits, targets = torch.randn(len(params), 300), targets_of(params)
    together = tokens_of(logits, targets, device)
    for row in (0, 4, 5):
        assert tokens_of(logits[row:], [SampleTarget(0, targets[row].request, 0)], device) == [together[row]]


def test_greedy_sampling_takes_the_first_of_equal_logits(device: torch.device) -> None:
    logits = with_ties(6, 5000, 0.5)
    logits[0] = -0.0
    logits[0, 70] = 0.0  # equal to -0.0
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert StepLogits.of(logits.to(device)).tokens.tolist() == expected
    mixed = targets_of([{"temperature": 0}] * 5 + [{}])
    assert tokens_of(logits, mixed, device)[:5] == expected[:5]


def test_edited_logits_equal_the_host(device: torch.device) -> None:
    params: list[Params] = [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.25, "logit_bias": ((3, 2.0),)},
        {},
        {"min_tokens": 9, "stop_token_ids": (40,), "logit_bias": ((5, -100.0), (40, 50.0))},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": 1.5},
        {"dry": DryParams(2.5, allowed_length=1), "logit_bias": ((5, 1.0),), "presence_penalty": 0.5},
    ]
    targets = targets_of(params, output_ids=[5, 5, 7, 5], end_ids=frozenset({2}))
    requests = [target.request for target in targets]
    logits = torch.randn(8, 500)
    sources = [6, 1, 6, 0, 7, 2]
    targets = [SampleTarget(source, request, 4) for source, request in zip(sources, requests, strict=True)]
    got = edited_logits(logits.to(device), build_rows(targets, 500).to(device)).cpu()
    expected = logits[sources]
    for step in (apply_bias, forbid_early_end, apply_penalties):
        expected = step(expected, requests)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    tokens = tokens_of(logits, [SampleTarget(p.source, r, 4) for p, r in zip(targets, requests, strict=True)], device)
    assert_same_as_sampler(logits[sources], requests, tokens)


def test_xtc_on_the_device_equals_the_host(device: torch.device) -> None:
    xtc = {"xtc_probability": 1.0, "xtc_threshold": 0.05}
    params = [{**xtc, **it} for it in (*FILTERS[:4], {"top_p": 0.9, "logit_bias": ((3, 2.0),)}, {"temperature": 0})]
    params.insert(2, {**xtc, "xtc_probability": 0.0})
    logits, targets = torch.randn(len(params), 100) * 2, targets_of(params)
    logits[0, :2] = logits[0].max() + torch.tensor([1.0, 1.1])  # at least two choices reach the threshold
    got = run(logits, build_rows(targets, 100), device).columns.token_ids.tolist()
    assert_same_as_sampler(logits, [target.request for target in targets], got)
    likely = torch.softmax(logits[:2], -1).argmax(-1).tolist()
    assert got[0] != likely[0]


def test_logprobs_are_of_the_unmodified_logits(device: torch.device) -> None:
    logits = torch.randn(6, 5000) * 3
    params: list[Params] = [
        {"logprobs": 20, "logit_bias": ((8, 50.0),)},
        {"logprobs": 0},
        {},
        {"logprobs": 3, "top_k": 5},
        {"logprobs": 2, "logit_bias": ((int(logits[4].argmax()), -100.0),)},
        {"logprobs": 3, "min_p": 0.2},
    ]
    targets = targets_of([{"temperature": 0, **it} for it in params])
    got = to_sampled_tokens(run(logits, build_rows(targets, 5000), device), targets)
    for ours, hosts in zip(got, sample_on_host(logits, [target.request for target in targets]), strict=True):
        assert ours.token_id == hosts.token_id
        assert (ours.logprobs is None) == (hosts.logprobs is None)
        if ours.logprobs and hosts.logprobs:
            assert ours.logprobs.logprob == pytest.approx(hosts.logprobs.logprob, abs=1e-5)
            assert [i for i, _ in ours.logprobs.top] == [i for i, _ in hosts.logprobs.top]
            assert [p for _, p in ours.logprobs.top] == pytest.approx([p for _, p in hosts.logprobs.top], abs=1e-5)


def test_drawn_logprobs_equal_the_host(device: torch.device) -> None:
    edits: list[Params] = [
        {},
        {"temperature": 0},
        {"logit_bias": ((8, 3.0),), "repetition_penalty": 1.5},
        {"xtc_probability": 1.0, "xtc_threshold": 0.1},
    ]
    params: list[Params] = [
        {"logprobs": 5, "drawn_logprobs": True, **one, **two}
        for one in FILTERS
        for two in edits
        if one != {"top_p": 0.0}
    ]
    params += [{"logprobs": 3}, {"drawn_logprobs": True}]
    targets = targets_of(params)
    logits = torch.randn(len(params), 3000) * 3
    got = to_sampled_tokens(run(logits, build_rows(targets, 3000), device), targets)
    for ours, hosts in zip(got, sample_on_host(logits, [target.request for target in targets]), strict=True):
        if ours.token_id != hosts.token_id:
            continue  # the number is at a boundary, and float32 rounds it to the other side
        assert (ours.logprobs is None) == (hosts.logprobs is None)
        if ours.logprobs and hosts.logprobs:
            assert math.exp(ours.logprobs.logprob) == pytest.approx(math.exp(hosts.logprobs.logprob), abs=1e-5)
            assert [i for i, _ in ours.logprobs.top] == [i for i, _ in hosts.logprobs.top]
            chances = [[math.exp(p) for _, p in one.top] for one in (ours.logprobs, hosts.logprobs)]
            assert chances[0] == pytest.approx(chances[1], abs=1e-5)


def test_logprobs_omit_impossible_alternatives(device: torch.device) -> None:
    logits = torch.full((1, 100), -torch.inf)
    logits[0, [50, 20]] = 1.0
    targets = targets_of([{"logprobs": 5, "temperature": 0}])
    (token,) = to_sampled_tokens(run(logits, build_rows(targets, 100), device), targets)
    assert token.logprobs
    assert [i for i, _ in token.logprobs.top] == [20, 50]


def test_grammar_masks_equal_the_host(device: torch.device) -> None:
    """Row 0 has no grammar. The bias of row 2 leaves no allowed token, row 3 holds NaN, and the grammar of row 4 has
    failed.
    """
    bias = tuple((token_id, 100.0) for token_id in range(0, 70, 7))
    params: list[Params] = [{"temperature": 0, **it} for it in ({}, {"logit_bias": bias}, {"min_tokens": 9}, {}, {})]
    targets = targets_of(params, end_ids=frozenset({5, 9}))
    words = np.random.default_rng().integers(0, 1 << 32, (4, 157), np.uint32).view(np.int32)
    words[0, 0] &= ~(1 << 4)  # NaN is reported even for a token that is not allowed
    words[2] = 0
    words[2, 0] = 1 << 5 | 1 << 9
    masks = Masks(words, {(1, 0): 3, (2, 0): 2, (3, 0): 0}, {4: "broken"})
    logits = torch.randn(5, 5000)
    logits[3, 4] = torch.nan
    requests = [target.request for target in targets]
    expected = logits
    for step in (apply_bias, forbid_early_end, apply_penalties):
        expected = step(expected, requests)
    expected = masked(
        expected, logits, torch.from_numpy(masks.allowed_rows([target.position for target in targets], 5000))
    )
    rows = build_rows(targets, 5000, masks)
    got = edited_logits(logits.to(device), rows.to(device)).cpu()
    assert torch.equal(got[:3], expected[:3])
    found = to_sampled_tokens(run(logits, rows, device), targets, masks)
    assert [it.token_id for it in found[:3]] == expected[:3].argmax(-1).tolist()
    assert [it.problem for it in found] == ["", "", "", NOT_NUMBERS, "broken"]
