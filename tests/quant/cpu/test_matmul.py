"""Products of tiles: they equal the integer reference bit for bit, and are near the product of dequantized weights."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.cpu.activations import Form
from quant.cpu.arena import Arena
from quant.cpu.linear import CpuBackend, CpuLinear
from quant.ggml_blocks import BLOCKS, decode
from quant.kernels import reference
from quant.tensor import QTensor
from tests.quant.cpu.integer_reference import product
from tests.quant.cpu.random_weights import (
    CODED_GROUP_TYPES,
    EVERY,
    FLOAT_GROUP_TYPES,
    KINDS,
    PLAIN,
    QUANTIZED,
    bits,
    random_weight,
    width,
)

SEED = 4
SHAPES = [
    (1, 32), (15, 64), (16, 96), (17, 32), (31, 160), (32, 64), (33, 96), (47, 32), (64, 256), (65, 128), (75, 160),
    (49, 800),
]  # fmt: skip
TOKENS = 9
INTEGERS, FLOATS = (*QUANTIZED, *CODED_GROUP_TYPES), (*PLAIN, *FLOAT_GROUP_TYPES)


@pytest.fixture(autouse=True)
def poisoned(every_layout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the kernels, and fill uninitialized memory with NaN."""
    fresh = torch.empty

    def poisoned_empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        memory = fresh(*shape, dtype=dtype)
        memory.view(torch.uint8).fill_(0xFF)
        return memory

    monkeypatch.setattr(torch, "empty", poisoned_empty)


def layer(*segments: QTensor, form: Form = Form.BITS_14) -> CpuLinear:
    return CpuBackend(Arena(), form).linear(segments)


def form_of(made: CpuLinear) -> Form:
    (part,) = made.parts
    return made.form(part)


def activations(tokens: int, columns: int, rng: np.random.Generator) -> Tensor:
    """Return rows whose groups have very different magnitudes, as in a model."""
    sizes = np.exp(rng.standard_normal((tokens, columns // 32, 1)) * 2)
    values = rng.standard_normal((tokens, columns // 32, 32)) * sizes
    return torch.from_numpy(values.reshape(tokens, columns).astype(np.float32))


def example(name: str, shape: tuple[int, int]) -> tuple[QTensor, Tensor]:
    """Return a weight of about this shape, and rows to multiply by it."""
    rng = np.random.default_rng(SEED)
    rows, columns = shape[0], width(name, shape[1])
    return random_weight(name, rows, columns, rng), activations(TOKENS, columns, rng)


@pytest.mark.share(2, "name", "form")
@pytest.mark.parametrize("form", [Form.BITS_8, Form.BITS_14])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", EVERY)
def test_every_bit_equals_the_integer_reference(name: str, shape: tuple[int, int], form: Form) -> None:
    weight, x = example(name, shape)
    made = layer(weight, form=form)
    assert torch.equal(bits(made.forward(x)), bits(torch.from_numpy(product(weight, x.numpy(), form_of(made)))))


@pytest.mark.parametrize("name", [name for name in QUANTIZED if width(name, 32) == 256])
def test_largest_super_block_sums_equal_the_integer_reference(name: str) -> None:
    """All codes, sub-scales, and activations are extreme: no order of additions overflows int32."""
    kind, block, rng = KINDS[name], BLOCKS[name], np.random.default_rng(SEED)
    raw = rng.choice([0, 255], (48, 2, kind.block_bytes)).astype(np.uint8)
    raw[:16], raw[16:32] = 0, 255
    for factor in (block.scale, block.minimum):
        if factor is not None:
            raw[:, :, factor.at : factor.at + 2] = np.array([1.5], np.float16).view(np.uint8)
    weight = decode(kind, memoryview(raw.tobytes()), (48, 512))
    x = rng.choice([-1, 1], (9, 512)).astype(np.float32)
    x[0], x[1], x[2] = 1, -1, np.sign(reference.dequantize(weight)[0].numpy() + 1e-9)
    made = layer(weight, form=Form.BITS_8)
    assert form_of(made) is Form.SUPER_BLOCKS
    out = made.forward(torch.from_numpy(x))
    assert out.abs().max() > 500
    assert torch.equal(bits(out), bits(torch.from_numpy(product(weight, x, Form.SUPER_BLOCKS))))


@pytest.mark.share(3, "name")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FLOATS)
def test_float_weights_are_multiplied_in_float32(name: str, shape: tuple[int, int]) -> None:
    weight, x = example(name, shape)
    expected = reference.matmul(x, reference.dequantize(weight))
    size = x.abs() @ reference.dequantize(weight).abs().T  # sum of the magnitudes of the terms
    assert ((layer(weight).forward(x) - expected).abs() <= 2e-6 * size).all()


@pytest.mark.share(2, "name", "form")
@pytest.mark.parametrize("form", [Form.BITS_8, Form.BITS_14])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", INTEGERS)
def test_error_is_bounded_by_the_quantization_of_activations(name: str, shape: tuple[int, int], form: Form) -> None:
    """The bound is half a step of the activations that share a scale, times the magnitudes of the weights."""
    weight, x = example(name, shape)
    values, made = reference.dequantize(weight), layer(weight, form=form)
    steps = 127 if form is Form.BITS_8 else 127 * 128
    size = 256 if form_of(made) is Form.SUPER_BLOCKS else 32
    half_steps = x.view(TOKENS, -1, size).abs().amax(-1) / steps / 2
    bound = half_steps @ values.view(len(values), -1, size).abs().sum(-1).T
    rounding = 4e-6 * (x.abs() @ values.abs().T)
    error = (made.forward(x) - reference.matmul(x, values)).abs()
    assert (error <= 1.001 * bound + rounding).all()
    if form is Form.BITS_8:
        assert (error / bound).max() > 0.02  # the bound is not too loose


def slices(tokens: int) -> Sequence[tuple[int, int]]:
    """Return slices of the tokens: all prefixes up to 13, and some slices across blocks of 4, 6, and 128."""
    first = [(0, n) for n in range(1, 14)]
    return [*first, (3, 4), (5, 7), (2, 11), (4, 8), (126, 131), (127, 130), (1, tokens), (tokens - 1, tokens)]


@pytest.mark.share(1, "name", "form")
@pytest.mark.parametrize("form", [Form.BITS_8, Form.BITS_14])
@pytest.mark.parametrize("shape", [(75, 160), (32, 64), (17, 32), (200, 576)])
@pytest.mark.parametrize("name", EVERY)
def test_tokens_have_the_same_bits_in_any_batch(name: str, shape: tuple[int, int], form: Form) -> None:
    rng = np.random.default_rng(SEED)
    multiply = layer(random_weight(name, shape[0], width(name, shape[1]), rng), form=form).forward
    x = activations(133, width(name, shape[1]), rng)
    together = multiply(x)
    assert together.isfinite().all()
    for start, stop in slices(133):
        assert torch.equal(bits(multiply(x[start:stop])), bits(together[start:stop])), (start, stop)


@pytest.mark.parametrize("name", EVERY)
def test_outputs_have_the_same_bits_with_other_segments(name: str) -> None:
    rng = np.random.default_rng(SEED)
    columns = width(name, 64)
    whole = random_weight(name, 96, columns, rng)
    x = activations(6, columns, rng)
    rows = [random_weight(name, 1, columns, np.random.default_rng(row)) for row in range(3)]
    together = layer(whole, *rows).forward(x)
    assert torch.equal(bits(layer(whole).forward(x)), bits(together[:, :96]))
    for index, row in enumerate(rows):
        assert torch.equal(bits(layer(row).forward(x)), bits(together[:, 96 + index : 97 + index]))


@pytest.mark.parametrize("name", EVERY)
def test_nan_in_one_row_does_not_affect_other_rows(name: str) -> None:
    rng = np.random.default_rng(SEED)
    multiply = layer(random_weight(name, 40, width(name, 64), rng)).forward
    x = activations(11, width(name, 64), rng)
    clean = multiply(x)
    for poisoned in (0, 4, 10):
        spoiled = x.clone()
        spoiled[poisoned] = torch.nan
        out = multiply(spoiled)
        keep = torch.arange(11) != poisoned
        assert torch.equal(bits(out[keep]), bits(clean[keep]))
        assert out[poisoned].isnan().all()


@pytest.mark.parametrize("name", EVERY)
def test_empty_input_gives_empty_output(name: str) -> None:
    columns = width(name, 32)
    multiply = layer(random_weight(name, 6, columns, np.random.default_rng(SEED))).forward
    assert multiply(torch.zeros(0, columns)).shape == (0, 6)


@pytest.mark.parametrize("name", EVERY)
def test_input_rows_need_not_be_contiguous(name: str) -> None:
    rng = np.random.default_rng(SEED)
    columns = width(name, 64)
    multiply = layer(random_weight(name, 20, columns, rng)).forward
    wide = activations(7, 2 * columns, rng)
    assert torch.equal(multiply(wide[::2, columns:]), multiply(wide[::2, columns:].clone()))
