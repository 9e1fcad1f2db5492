import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.request import Request
from engine.sampling.masks import Masks
from engine.sampling.sampler import apply_penalties, sample, uniform
from engine.sampling_params import SamplingParams

VOCABULARY = 11
LOGITS = torch.tensor([0.5, 3.0, 2.0, -1.0, 2.5, 0.0, -2.0, 1.0, -4.0, 1.5, -0.5])


def request(
    *, prompt: Sequence[int] = (0,), output: Sequence[int] = (), ends: Sequence[int] = (), **params: object
) -> Request:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(1, tuple(prompt), sampling, frozenset(ends), output_ids=list(output))


def picked(logits: Tensor, **params: object) -> int:
    token_id = sample(logits.unsqueeze(0), [request(**params)])[0].token_id  # type: ignore[arg-type]
    assert token_id is not None
    return token_id


def frequencies(count: int = 4000, **params: object) -> Tensor:
    """Return how often each token is drawn from LOGITS, over `count` seeds."""
    requests = [request(seed=seed, **params) for seed in range(count)]  # type: ignore[arg-type]
    drawn = Counter(token.token_id for token in sample(LOGITS.repeat(count, 1), requests))
    return torch.tensor([drawn[i] / count for i in range(VOCABULARY)])


def test_temperature_zero_samples_the_most_likely_token() -> None:
    assert picked(LOGITS, temperature=0) == 1
    assert picked(torch.zeros(VOCABULARY), temperature=0) == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, -1)
    assert (frequencies(temperature=temperature) - expected).abs().max() < 0.03


def renormalized(keep: list[int]) -> Tensor:
    probabilities = torch.softmax(LOGITS, -1)
    kept = torch.zeros(VOCABULARY)
    kept[keep] = probabilities[keep]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 4, 2]),
        ({"top_k": 100}, list(range(VOCABULARY))),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 0.40}, [1, 4]),  # the first token has 0.39
        ({"top_p": 0.38}, [1]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.35}, [1, 4, 2]),  # e^-0.5 and e^-1 pass, e^-1.5 does not
        ({"top_k": 2, "top_p": 0.95, "min_p": 0.01}, [1, 4]),
    ],
)
def test_filters_keep_the_expected_tokens(params: dict[str, object], kept: list[int]) -> None:
    drawn = frequencies(**params)  # type: ignore[arg-type]
    assert set(drawn.nonzero().flatten().tolist()) <= set(kept)
    assert (drawn - renormalized(kept)).abs().max() < 0.03


def test_ties_at_the_edge_of_top_k_keep_exactly_k() -> None:
    drawn = {picked(torch.zeros(VOCABULARY), top_k=2, seed=seed) for seed in range(100)}
    assert drawn == {0, 1}


def test_seed_and_index_determine_the_token_in_any_batch() -> None:
    logits = torch.randn(40, 5000)
    requests = [request(seed=n, output=[1] * (n % 3)) for n in range(40)]
    together = [token.token_id for token in sample(logits, requests)]
    alone = [sample(logits[n : n + 1], [requests[n]])[0].token_id for n in range(40)]
    assert together == alone


@pytest.mark.parametrize("params", [{}, {"top_k": 40}, {"top_p": 0.9}], ids=str)
def test_masked_rows_draw_the_same_token_in_any_batch(params: dict[str, object]) -> None:
    """The masks allow 1 to 30, up to 1,000, and nearly all of 5,000 tokens."""
    counts = [*range(1, 31), 50, 300, 1000, 4000, 4990]
    words = np.zeros((len(counts), 5024), np.uint8)
    for row, count in enumerate(counts):
        words[row, np.random.default_rng().choice(5000, count, replace=False)] = 1
    masks = Masks(
        np.packbits(words, axis=1, bitorder="little").view(np.int32),
        {(count, 0): row for row, count in enumerate(counts)},
        {},
    )
    requests = [request(seed=n, **params) for n in range(len(counts))]  # type: ignore[arg-type]
    for one, number in zip(requests, counts, strict=True):
        one.id = number
    logits = torch.randn(len(counts), 5000)
    together = [token.token_id for token in sample(logits, requests, masks)]
    alone = [sample(logits[n : n + 1], [it], masks)[0].token_id for n, it in enumerate(requests)]
    assert together == alone
    assert all(words[row, token_id] for row, token_id in enumerate(together))


def test_uniform_numbers_differ_by_index() -> None:
    numbers = {uniform(5, index) for index in range(1000)}
    assert len(numbers) == 1000
    assert all(0 <= number < 1 for number in numbers)


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    requests = [request(temperature=0), request(seed=3, temperature=2.0), request(temperature=0)]
    tokens = sample(LOGITS.repeat(3, 1), requests)
    assert tokens[0].token_id == tokens[2].token_id == 1


def test_logit_bias_changes_the_sampled_token() -> None:
    assert picked(LOGITS, temperature=0, logit_bias=((8, 50.0),)) == 8
    assert picked(LOGITS, temperature=0, logit_bias=((1, -100.0),)) == 4


def test_end_tokens_are_excluded_before_min_tokens() -> None:
    ends = {"ends": [1], "stop_token_ids": (4,), "min_tokens": 2, "temperature": 0}
    assert picked(LOGITS, **ends) == 2
    assert picked(LOGITS, **ends, output=[0]) == 2
    assert picked(LOGITS, **ends, output=[0, 0]) == 1


def test_penalties_lower_the_logits_of_used_tokens() -> None:
    """Token 1 is in the prompt, token 4 was generated twice, token 3 (a negative logit) once."""
    params: dict[str, object] = {"repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.5}
    out = apply_penalties(LOGITS.unsqueeze(0), [request(prompt=[1], output=[4, 4, 3], **params)])[0]  # type: ignore[arg-type]
    expected = LOGITS.clone()
    expected[1] = 3.0 / 2
    expected[4] = 2.5 / 2 - 2 * 0.5 - 0.25
    expected[3] = -1.0 * 2 - 0.5 - 0.25
    torch.testing.assert_close(out, expected)


def test_penalties_of_one_request_do_not_affect_others() -> None:
    logits = LOGITS.repeat(2, 1)
    out = apply_penalties(logits, [request(prompt=[1], repetition_penalty=3.0), request(prompt=[1])])
    assert torch.equal(out[1], LOGITS)
    assert torch.equal(logits[0], LOGITS)


def test_logprobs_use_the_models_own_distribution() -> None:
    params = {"temperature": 0, "logit_bias": ((8, 50.0),), "logprobs": 3}
    token = sample(LOGITS.unsqueeze(0), [request(**params)])[0]  # type: ignore[arg-type]
    expected = torch.log_softmax(LOGITS, -1)
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[8]), abs=1e-6)
    assert [token_id for token_id, _ in token.logprobs.top] == [1, 4, 2]
    assert token.logprobs.top[0][1] == pytest.approx(float(expected[1]), abs=1e-6)


def test_logprobs_are_reported_only_if_requested() -> None:
    tokens = sample(LOGITS.repeat(2, 1), [request(logprobs=0), request()])
    assert tokens[0].logprobs is not None
    assert tokens[0].logprobs.top == ()
    assert tokens[1].logprobs is None


def drawn_from(**params: object) -> Tensor:
    """Return the probabilities that are reported with `drawn_logprobs`."""
    asked = {"logprobs": VOCABULARY, "drawn_logprobs": True, "seed": 3, **params}
    [token] = sample(LOGITS.unsqueeze(0), [request(**asked)])  # type: ignore[arg-type]
    assert token.logprobs is not None
    probabilities = torch.zeros(VOCABULARY)
    for token_id, logprob in token.logprobs.top:
        probabilities[token_id] = math.exp(logprob)
    assert math.exp(token.logprobs.logprob) == pytest.approx(float(probabilities[token.token_id or 0]))
    return probabilities


@pytest.mark.parametrize(
    ("params", "kept"), [({}, list(range(VOCABULARY))), ({"top_k": 3}, [1, 4, 2]), ({"min_p": 0.5}, [1, 4])]
)
def test_drawn_logprobs_equal_the_filtered_distribution(params: dict[str, object], kept: list[int]) -> None:
    assert drawn_from(**params).tolist() == pytest.approx(renormalized(kept).tolist(), abs=1e-6)


def test_drawn_logprobs_include_temperature_bias_and_xtc() -> None:
    cold = torch.softmax(LOGITS / 0.5, -1)
    assert drawn_from(temperature=0.5).tolist() == pytest.approx(cold.tolist(), abs=1e-6)
    greedy = drawn_from(temperature=0, top_p=0.9)
    assert greedy.tolist() == [float(token_id == 1) for token_id in range(VOCABULARY)]
    biased = LOGITS.clone()
    biased[8] += 5
    expected = torch.softmax(biased, -1).tolist()
    assert drawn_from(logit_bias=((8, 5.0),)).tolist() == pytest.approx(expected, abs=1e-6)
    without_best = drawn_from(xtc_probability=1.0, xtc_threshold=0.2, top_k=3)
    assert (without_best > 0).tolist() == [token_id in (2, 4) for token_id in range(VOCABULARY)]


def test_drawn_logprobs_include_the_grammar_mask() -> None:
    one = request(logprobs=VOCABULARY, drawn_logprobs=True)
    masks = Masks(np.array([[1 << 2 | 1 << 5]], np.int32), {(one.id, 0): 0}, {})
    [token] = sample(LOGITS.unsqueeze(0), [one], masks)
    assert token.logprobs is not None
    told = {token_id: math.exp(logprob) for token_id, logprob in token.logprobs.top}
    expected = torch.softmax(LOGITS[[2, 5]], -1).tolist()
    assert [told[2], told[5]] == pytest.approx(expected, abs=1e-6)
    assert sum(told.values()) == pytest.approx(1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0, 1e-9])
def test_nan_and_infinity_are_reported_as_problems(value: float, temperature: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 5] = value
    requests = [request(temperature=temperature) for _ in range(3)]
    for number, one in enumerate(requests):
        one.id = number
    tokens = sample(logits, requests)
    assert [token.token_id for token in tokens] == [1, None, 1]
    assert "NaN or infinite" in tokens[1].problem
    assert not tokens[0].problem
    assert not tokens[2].problem


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-40, 5e-324])
def test_tiny_temperature_samples_the_most_likely_token(temperature: float) -> None:
    requests = [request(temperature=temperature, seed=1), request(temperature=1.0, seed=2)]
    assert sample(LOGITS.repeat(2, 1), requests)[0].token_id == 1
