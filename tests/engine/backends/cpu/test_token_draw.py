"""The compiled draw, against its definition and against the reference implementation."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.backends.cpu.code_cache import load_draw
from engine.backends.cpu.token_draw import BLOCK, CompiledDraw
from engine.grammar import Words
from engine.request import Request
from engine.sampling.drawing import NO_TOKEN
from engine.sampling.masks import Masks
from engine.sampling.sampler import sample
from engine.sampling_params import SamplingParams
from quant.cpu import tiers

SIZES = [1, 11, 16, 77, BLOCK, BLOCK + 1, 5000]
ROWS = 12
NEXT_TO_ONE = 1 - 2**-53


def compiled(cpu_kernels: Path, vocabulary: int) -> CompiledDraw:
    return CompiledDraw(load_draw(cpu_kernels, tiers.choose("auto")), vocabulary)


def some_allowed(rows: int, vocabulary: int, seed: int | None = None) -> tuple[NDArray[np.bool_], Words]:
    """Return random allowed tokens, at least one per row: as booleans and as mask words."""
    generator = np.random.default_rng(seed)
    allowed = np.zeros((rows, -(-vocabulary // 32) * 32), np.bool_)
    allowed[:, :vocabulary] = generator.random((rows, vocabulary)) < generator.random((rows, 1))
    allowed[range(rows), generator.integers(0, vocabulary, rows)] = True
    return allowed[:, :vocabulary], np.packbits(allowed, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("vocabulary", SIZES)
def test_uniform_number_selects_the_expected_token(cpu_kernels: Path, vocabulary: int) -> None:
    """A neighboring token is accepted if the number is within rounding of a boundary. Rows come from a larger array."""
    allowed, words = some_allowed(ROWS, vocabulary)
    logits = torch.full((2 * ROWS, vocabulary + 5), torch.nan)[:, :vocabulary]
    logits[1::2] = torch.randn(ROWS, vocabulary) * 4
    temperatures, numbers = np.random.uniform(0.3, 2, ROWS), np.random.random(ROWS)
    draw = compiled(cpu_kernels, vocabulary)
    for masked in (False, True):
        mask_rows = list(range(ROWS)) if masked else [-1] * ROWS
        rows = list(range(1, 2 * ROWS, 2))
        drawn = np.array(draw(logits, rows, words, mask_rows, temperatures.tolist(), numbers.tolist()))
        scaled = logits[1::2].double().numpy() / temperatures[:, None]
        scaled[~allowed if masked else np.zeros_like(allowed)] = -np.inf
        weights = torch.softmax(torch.from_numpy(scaled), -1).numpy()
        until = weights.cumsum(-1)[range(ROWS), drawn]
        assert (until > numbers - 1e-5).all()
        assert (until - weights[range(ROWS), drawn] < numbers + 1e-5).all()
        assert (weights[range(ROWS), drawn] > 0).all()


def test_impossible_tokens_are_never_drawn(cpu_kernels: Path) -> None:
    logits = torch.full((2, 999), -torch.inf)
    logits[0, [3, 300]] = torch.tensor([1.0, 200.0])
    draw, words = compiled(cpu_kernels, 999), np.zeros((1, 32), np.int32)
    words[0, 0] = 1 << 3 | 1 << 5
    ones = [1.0] * 5
    numbers = [0.0, NEXT_TO_ONE, 0.0, NEXT_TO_ONE, 0.5]
    assert draw(logits, [0, 0, 0, 0, 1], words, [-1, -1, 0, 0, -1], ones, numbers) == [300, 300, 3, 3, NO_TOKEN]
    words[:] = 0
    assert draw(logits, [0], words, [0], [1.0], [0.5]) == [NO_TOKEN]
    logits[0, 7] = torch.inf
    assert draw(logits, [0], words, [-1], [1.0], [0.5]) == [NO_TOKEN]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-40, 5e-324])
def test_tiny_temperatures_draw_the_most_likely_token(cpu_kernels: Path, temperature: float) -> None:
    logits = torch.randn(1, 1000)
    logits[0, 567] = 9.0
    draw = compiled(cpu_kernels, 1000)
    for number in (0.0, 0.5, NEXT_TO_ONE):
        drawn = draw(logits, [0], np.zeros((0, 0), np.int32), [-1], [temperature], [number])
        assert drawn == [567]


def test_arguments_out_of_range_are_rejected(cpu_kernels: Path) -> None:
    draw = compiled(cpu_kernels, 100)
    for vocabulary, words in ((101, 4), (100, 3)):
        with pytest.raises(ValueError, match=r"rows of 100|not 4"):
            draw(torch.zeros(1, vocabulary), [0], np.zeros((1, words), np.int32), [0], [1.0], [0.5])
    for row, mask_row in ((1, 0), (-1, 0), (0, 1)):
        with pytest.raises(IndexError):
            draw(torch.zeros(1, 100), [row], np.zeros((1, 4), np.int32), [mask_row], [1.0], [0.5])


def test_compiled_draw_does_not_change_sampled_tokens(cpu_kernels: Path) -> None:
    """Tokens are sampled with and without filters and grammars. A bias that leaves no allowed token is ignored."""
    vocabulary = 3000
    kinds = [{}, {"temperature": 0.7}, {"temperature": 0}, {"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.1},
             {"xtc_probability": 1.0}, {"min_tokens": 5}]  # fmt: skip
    requests = [
        Request(number, (1,), SamplingParams(seed=number, **kinds[number % len(kinds)]), frozenset({7}))  # type: ignore[arg-type]
        for number in range(40)
    ]
    allowed, words = some_allowed(20, vocabulary, seed=20)
    words[15] = 0
    words[15, 0] = 1 << 7
    masks = Masks(words, {(2 * row + 1, 0): row for row in range(20)}, {})
    logits = torch.randn(40, vocabulary, generator=torch.Generator().manual_seed(20)) * 3
    draw = compiled(cpu_kernels, vocabulary)
    found = sample(logits, requests, masks, draw)
    assert found == sample(logits, requests, masks)
    assert found[31].token_id == 7
    for number in range(1, 40, 2):
        assert number == 31 or allowed[number // 2, found[number].token_id]
    for number, request in enumerate(requests):
        assert sample(logits[number : number + 1], [request], masks, draw) == [found[number]]
