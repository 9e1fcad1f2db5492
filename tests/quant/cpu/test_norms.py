"""Layer normalization of rows, compared with float64."""

import numpy as np
import pytest

from quant.cpu.activations import GROUP
from quant.cpu.norms import layer_norm_row
from tests.quant.cpu.kernel_call import call, float_bits

SEED = 11
GUARD = 16
WIDTHS = [32, 64, 96, 576, 1056]

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
@pytest.mark.parametrize("in_place", [False, True])
def test_layer_norm_row_matches_float64(width: int, epsilon: float, in_place: bool) -> None:
    rng = np.random.default_rng(SEED)
    for mean, size in ((0.0, 1.0), (3.0, 1e-2), (-40.0, 300.0)):
        x = (mean + rng.standard_normal(width + GUARD) * size).astype(np.float32)
        weight, exact = rng.standard_normal(width).astype(np.float32), np.float64(x[:width])
        out = x if in_place else np.full(width + GUARD, np.nan, np.float32)
        guard = out[width:].copy()
        call(layer_norm_row, x, weight, width // GROUP, float_bits(epsilon), out)
        centered = exact - exact.mean()
        wanted = centered / np.sqrt(np.mean(centered**2) + epsilon) * weight
        assert np.array_equal(out[width:], guard, equal_nan=True)
        np.testing.assert_allclose(out[:width], wanted, rtol=1e-5, atol=1e-6 + 2e-7 * abs(mean) / size)
