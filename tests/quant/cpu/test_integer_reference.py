"""The oracle of the CPU kernels, tested against exact fractions and plain products."""

from fractions import Fraction

import numpy as np

from quant.cpu.activations import Form
from quant.kernels.reference import dequantize
from tests.quant.cpu.integer_reference import fused, product, quantize
from tests.quant.cpu.random_weights import QUANTIZED, random_weight, width

SEED = 3


def nearest(value: Fraction) -> np.float32:
    """Return the float32 nearest to a fraction, ties to even, by comparing adjacent floats."""
    guess = np.float32(float(value))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda f: (abs(Fraction(float(f)) - value), int(f.view(np.int32)) & 1))


def test_fused_multiply_add_rounds_once() -> None:
    rng = np.random.default_rng(SEED)
    x, y, z = rng.standard_normal((3, 3000)).astype(np.float32)
    # sums in which almost all bits cancel
    z[::2] = (-np.float64(x) * y * (1 + rng.integers(-4, 5, 3000) * 2.0**-24))[::2]
    # The exact sum is slightly below a tie of float32, and float64 rounds it to the tie.
    x[0], y[0], z[0] = 1 + 2.0**-15, 2.0**-24 * (1 - 2.0**-15), 1 + 2.0**-23
    terms = zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    expected = [nearest(Fraction(a) * Fraction(b) + Fraction(c)) for a, b, c in terms]
    assert np.array_equal(fused(x, y, z), np.array(expected, np.float32))
    assert fused(x[0], y[0], z[0]) != np.float32(np.float64(x[0]) * y[0] + z[0])


def test_product_equals_the_product_of_quantized_rows() -> None:
    rng = np.random.default_rng(SEED)
    for name in QUANTIZED:
        columns = width(name, 96) + width(name, 32)
        x = rng.standard_normal((5, columns), np.float32)
        weight = random_weight(name, 20, columns, rng)
        for form in (Form.BITS_8, Form.BITS_14, *[Form.SUPER_BLOCKS] * (columns % 256 == 0)):
            rows = quantize(x, form)
            values = (rows.numbers * rows.scales[..., None].astype(np.float64)).reshape(x.shape)
            exact = values @ dequantize(weight).double().numpy().T
            size = np.abs(values) @ dequantize(weight).abs().double().numpy().T
            assert (np.abs(product(weight, x, form) - exact) <= 1e-5 * size + 1e-6).all()
