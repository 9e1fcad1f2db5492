"""Kernels over float32 arrays of any length: accuracy, and no writes past the end."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.backends.cpu.floats import add_floats, copy_floats, multiply_floats
from engine.backends.cpu.soft_cap import cap_floats
from tests.quant.cpu.kernel_call import call, float_bits

SEED = 12
COUNTS = [*range(1, 35), 47, 48, 49]
Floats = NDArray[np.float32]

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def floats(count: int, seed: int = SEED) -> Floats:
    return (np.random.default_rng(seed).standard_normal(count) * 3).astype(np.float32)


def into(out: Floats, kernel: Any, *arguments: Any) -> Floats:
    """Run a kernel with `out` among its arguments. Returns the result, and checks that memory after it is unchanged."""
    memory = np.full(len(out) + 17, np.nan, np.float32)
    memory[: len(out)] = out
    call(kernel, *(memory if it is out else it for it in arguments))
    assert np.isnan(memory[len(out) :]).all()
    return memory[: len(out)]


@pytest.mark.parametrize("count", COUNTS)
def test_kernels_handle_any_number_of_floats(count: int) -> None:
    x, y = floats(count), floats(count, SEED + 1)
    assert np.array_equal(into(x, multiply_floats, x, count, float_bits(1.7)), x * np.float32(1.7))
    assert np.array_equal(into(y, copy_floats, x, count, y), x)
    assert np.array_equal(into(y, add_floats, x, count, y), y + x)
    np.testing.assert_allclose(into(x, cap_floats, x, count, float_bits(2.5)), 2.5 * np.tanh(x / 2.5), rtol=1e-6)


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_soft_cap_is_accurate_at_any_scale(cap: float) -> None:
    """The relative error is that of float32 for logits of any magnitude. NaN stays NaN."""
    x = np.concatenate([np.geomspace(1e-30, 1e30, 5000), np.linspace(0, 12, 5000) * cap, [0.0, np.inf]])
    x = np.concatenate([x, -x]).astype(np.float32)
    capped = into(x, cap_floats, x, len(x), float_bits(cap))
    np.testing.assert_allclose(capped, cap * np.tanh(np.float64(x) / cap), rtol=6e-7)
    spoiled = np.full(3, np.nan, np.float32)
    assert np.isnan(into(spoiled, cap_floats, spoiled, 3, float_bits(cap))).all()
