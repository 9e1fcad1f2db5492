"""The operations of vector code, checked bit for bit on every target that this processor can execute."""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numba.core import cgutils
from numpy.typing import NDArray

import quant.cpu.norms  # noqa: F401  # defines the kernel whose name is tried again
from quant.cpu import integer_dots
from quant.cpu.activations import PLANE_MAGNITUDES
from quant.cpu.dot_sums import DotSums
from quant.cpu.float16 import narrow, widen
from quant.cpu.kernel import KERNELS, Kernel, kernel
from quant.cpu.native import compile_kernels, link
from quant.cpu.tiers import TIERS, Target, available, choose, host_triple
from quant.cpu.vector import F16, F32, I8, I32, I64, Emit, F16x16, I8x64, I32x16
from tests.quant.cpu.integer_reference import fused, rounded_twice

SEED = 11
TABLE = (0, 1, 255, 128, 127, 3, 200, 77, 90, 11, 12, 13, 254, 15, 16, 17)
NUMBERS = tuple(np.random.default_rng(SEED).standard_normal(16).astype(np.float32).tolist())
TARGETS = [*(choose(tier.name) for tier in available()), TIERS[-1].target(host_triple(), frozenset())]
BITS = range(1, 9)
CHUNKS = 8  # dot products in a sum


def test_duplicate_kernel_name_raises_value_error() -> None:
    def norm_factor(e: Emit, x: Any) -> Any:
        return x

    registered = KERNELS["ingle_norm_factor"]
    with pytest.raises(ValueError, match="norm_factor"):
        kernel(norm_factor)
    assert KERNELS["ingle_norm_factor"] is registered
    assert registered.parameters == ["x", "groups", "epsilon"]


# -- kernels of one operation over many vectors

Build = Callable[..., None]


def over_rows(body: Callable[..., Any], bytes_in: Sequence[int], bytes_out: int) -> Build:
    """Make a kernel that stores the result of `body` for each row of its inputs."""

    def build(e: Emit, count: Any, out: Any, first: Any, second: Any, third: Any) -> None:
        with cgutils.for_range(e.b, count) as loop:
            inputs = zip((first, second, third), bytes_in, strict=False)
            at = [e.at(address, loop.index, size) for address, size in inputs]
            e.store(e.at(out, loop.index, bytes_out), body(e, *at))

    return build


def masked(e: Emit, count: Any, out: Any, first: Any, second: Any, third: Any) -> None:
    """Copy `count` floats, up to 16."""
    mask = e.first_lanes(count)
    e.store_some(out, e.load_some(first, mask), mask)


def dot(bits: int) -> Build:
    def body(e: Emit, total: Any, codes: Any, x: Any) -> Any:
        return integer_dots.dot(e, e.load(total, I32x16), e.load(codes, I32x16), e.load(x, I32x16), bits)

    return over_rows(body, (64, 64, 64), 64)


def dot_sums(bits: int, magnitude: int) -> Build:
    def body(e: Emit, total: Any, codes: Any, x: Any) -> Any:
        sums = DotSums(e, {"sum": e.load(total, I32x16)}, bits)
        for chunk in range(CHUNKS):
            sums.add("sum", e.load(e.at(codes, 64 * chunk), I32x16), e.load(e.at(x, 64 * chunk), I32x16), magnitude)
        return sums.totals()["sum"]

    return over_rows(body, (64, 64 * CHUNKS, 64 * CHUNKS), 64)


def dot_of_words(e: Emit, total: Any, x: Any, y: Any) -> Any:
    return integer_dots.dot_of_words(e, e.load(total, I32x16), e.load(x, I32x16), e.load(y, I32x16))


def gather(e: Emit, indices: Any, numbers: Any) -> Any:
    """Return the numbers at 16 indices."""
    return e.gather([e.at(numbers, e.b.zext(e.load(e.at(indices, 4 * lane), I32), I64), 4) for lane in range(16)])


BUILDS: dict[str, Build] = {
    "words": over_rows(dot_of_words, (64, 64, 64), 64),
    **{f"dot_{bits}": dot(bits) for bits in BITS},
    **{f"dot_sums_{bits}_{magnitude}": dot_sums(bits, magnitude) for bits in BITS for magnitude in PLANE_MAGNITUDES},
    "lookup_64": over_rows(lambda e, codes: e.lookup(e.load(codes, I8x64), TABLE), (64,), 64),
    "lookup_16": over_rows(lambda e, codes: e.lookup(e.load(codes, ir.VectorType(I8, 16)), TABLE), (16,), 16),
    "lookup_floats": over_rows(lambda e, codes: e.lookup_floats(e.load(codes, I32x16), NUMBERS), (64,), 64),
    "gather": over_rows(gather, (64, 64), 64),
    "widen": over_rows(lambda e, half: widen(e, e.load(half, F16x16)), (32,), 64),
    "widen_one": over_rows(lambda e, half: widen(e, e.load(half, F16)), (2,), 4),
    "narrow": over_rows(lambda e, single: narrow(e, e.load(single)), (64,), 32),
    "narrow_one": over_rows(lambda e, single: narrow(e, e.load(single, F32)), (4,), 2),
    "nearest": over_rows(lambda e, x: e.nearest(e.load(x)), (64,), 64),
    "fma": over_rows(lambda e, x, y, z: e.fma(e.load(x), e.load(y), e.load(z)), (64, 64, 64), 64),
    "exp": over_rows(lambda e, x: e.exp(e.load(x)), (64,), 64),
    "masked": masked,
}


class Compiled:
    """The kernels of BUILDS for one target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        kernels = [Kernel(name, build, returns=False) for name, build in BUILDS.items()]
        self._engine = link(compile_kernels(kernels, target), target)

    def call(self, name: str, count: int, out: int, *inputs: int) -> None:
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)
        kind(self._engine.get_function_address(name))(count, out, *inputs, *[0] * (3 - len(inputs)))

    def run(self, name: str, out: NDArray[Any], *inputs: NDArray[Any]) -> NDArray[Any]:
        """Call a kernel that fills `out`, one row for each row of the inputs, and return it."""
        assert all(it.flags.c_contiguous and len(it) == len(out) for it in inputs)
        self.call(name, len(out), out.ctypes.data, *(it.ctypes.data for it in inputs))
        return out


@pytest.fixture(scope="module", params=TARGETS, ids=lambda target: f"{target.tier}-{len(target.features)}")
def compiled(request: pytest.FixtureRequest) -> Compiled:
    return Compiled(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(SEED)


@pytest.mark.parametrize("bits", BITS)
def test_dot_is_exact(compiled: Compiled, rng: np.random.Generator, bits: int) -> None:
    """Combines the largest products of both signs in every way, and multiplies codes of every width by every byte."""
    rows, most = 3000, 2**bits - 1
    codes = rng.integers(0, most + 1, (rows, 16, 4)).astype(np.uint8)
    x = rng.integers(-127, 128, (rows, 16, 4)).astype(np.int8)
    codes[:1000] = rng.choice([0, most // 2, most // 2 + 1, most], (1000, 16, 4))
    x[500:1500] = rng.choice([-127, 127], (1000, 16, 4))
    codes[:16], x[:16] = most, 127
    codes[16:32], x[16:32] = most, -127
    total = rng.integers(-(2**30), 2**30, (rows, 16)).astype(np.int32)
    expected = total + (codes.astype(np.int64) * x).sum(-1)
    assert np.array_equal(compiled.run(f"dot_{bits}", np.empty_like(total), total, codes, x), expected)


@pytest.mark.parametrize("magnitude", PLANE_MAGNITUDES)
@pytest.mark.parametrize("bits", BITS)
def test_sums_of_dots_are_exact(compiled: Compiled, rng: np.random.Generator, bits: int, magnitude: int) -> None:
    """The first rows have the largest sums of either sign."""
    rows, most = 1000, 2**bits - 1
    codes = rng.integers(0, most + 1, (rows, CHUNKS, 16, 4)).astype(np.uint8)
    x = rng.integers(-magnitude, magnitude + 1, (rows, CHUNKS, 16, 4)).astype(np.int8)
    codes[:200], x[:200] = most, rng.choice([-magnitude, magnitude], (200, 1, 1, 4))
    codes[200:400], x[200:400] = most, rng.choice([-magnitude, magnitude], (200, CHUNKS, 16, 4))
    total = rng.integers(-(2**30), 2**30, (rows, 16)).astype(np.int32)
    expected = total + (codes.astype(np.int64) * x).sum((1, 3))
    found = compiled.run(f"dot_sums_{bits}_{magnitude}", np.empty_like(total), total, codes, x)
    assert np.array_equal(found, expected)


def test_dot_of_words_is_exact(compiled: Compiled, rng: np.random.Generator) -> None:
    """Covers the ranges of sub-scales and sums, and the largest int16."""
    x, y = rng.integers(-128, 256, (2000, 16, 2)), rng.integers(-4064, 4065, (2000, 16, 2))
    x[:100], y[:100] = rng.choice([-128, 255], (100, 16, 2)), rng.choice([-4064, 4064], (100, 16, 2))
    x[100:200], y[100:200] = rng.choice([-32767, 32767], (2, 100, 16, 2))
    total = rng.integers(-(2**30), 2**30, (2000, 16)).astype(np.int32)
    total[100:200] = 0
    expected = total + (x * y).sum(-1)
    found = compiled.run("words", np.empty_like(total), total, x.astype(np.int16), y.astype(np.int16))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("size", [16, 64])
def test_lookup_selects_table_entries(compiled: Compiled, rng: np.random.Generator, size: int) -> None:
    codes = rng.integers(0, 16, (200, size)).astype(np.uint8)
    codes[:16] = np.arange(16)[:, None]
    assert np.array_equal(compiled.run(f"lookup_{size}", np.empty_like(codes), codes), np.array(TABLE, np.uint8)[codes])


def test_lookup_floats_uses_the_low_four_bits(compiled: Compiled, rng: np.random.Generator) -> None:
    codes = rng.integers(0, 2**32, (200, 16), np.uint32)
    codes[:16] = np.arange(16)[:, None]
    found = compiled.run("lookup_floats", np.empty(codes.shape, np.float32), codes)
    assert np.array_equal(found, np.array(NUMBERS, np.float32)[codes & 15])


def test_gather_loads_numbers_at_indices(compiled: Compiled, rng: np.random.Generator) -> None:
    indices, numbers = rng.integers(0, 16, (50, 16), np.uint32), rng.standard_normal((50, 16), np.float32)
    found = compiled.run("gather", np.empty(numbers.shape, np.float32), indices, numbers)
    assert np.array_equal(found, np.take_along_axis(numbers, indices.astype(np.int64), 1))


def check_floats(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """Check that the bits are equal, and that NaN is NaN."""
    nan, kind = np.isnan(expected), f"u{expected.itemsize}"
    assert np.array_equal(np.isnan(found), nan)
    assert np.array_equal(found[~nan].view(kind), expected[~nan].view(kind))


@pytest.mark.parametrize("name", ["widen", "widen_one"])
def test_widen_is_exact_for_every_float16(compiled: Compiled, name: str) -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    lanes = 1 if name == "widen_one" else 16
    found = compiled.run(name, np.empty((2**16 // lanes, lanes), np.float32), halves.reshape(-1, lanes))
    with np.errstate(invalid="ignore"):
        check_floats(found.ravel(), halves.astype(np.float32))


@pytest.mark.parametrize("name", ["narrow", "narrow_one"])
def test_narrow_rounds_to_nearest_even(compiled: Compiled, rng: np.random.Generator, name: str) -> None:
    """Covers every float16, every midpoint between two, their neighbors, and random bits."""
    values = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float32)
    values[-1] = 65536  # the first value above float16's range
    middles = (values[:-1] + values[1:]) / 2
    near = np.concatenate([values, middles]).view(np.int32)
    near = np.concatenate([near - 1, near, near + 1]).view(np.float32)
    odd = np.array([np.inf, np.nan, 1e-45, 1e-38, 3.4e38, 65504, 65519.996, 65520], np.float32)
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0x7F801000], np.uint32).view(np.float32)
    bits = rng.integers(0, 2**32, 2**16, dtype=np.uint32).view(np.float32)
    values = np.concatenate([near, odd, nans, bits])
    values = np.concatenate([values, -values])
    values = values[: len(values) // 16 * 16]
    lanes = 1 if name == "narrow_one" else 16
    found = compiled.run(name, np.empty((len(values) // lanes, lanes), np.float16), values.reshape(-1, lanes))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        check_floats(found.ravel(), values.astype(np.float16))


def test_nearest_rounds_halves_to_even(compiled: Compiled, rng: np.random.Generator) -> None:
    x = np.concatenate([np.arange(-400, 400) / 2, rng.uniform(-(2**22), 2**22, 8000)]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.array([np.nan] * 16, np.float32)]).reshape(-1, 16)
    found = compiled.run("nearest", np.empty_like(x), x)
    assert np.array_equal(found, np.rint(x), equal_nan=True)


def test_fma_rounds_once_if_the_target_can(compiled: Compiled, rng: np.random.Generator) -> None:
    x, y, z = rng.standard_normal((3, 1000, 16)).astype(np.float32)
    z[:500] = -x[:500] * y[:500]  # the exact sum is the rounding error of the product
    twin = fused if compiled.target.has("fma", "neon") else rounded_twice
    assert np.array_equal(compiled.run("fma", np.empty_like(x), x, y, z), twin(x, y, z))


def test_exp_is_within_its_stated_error(compiled: Compiled, rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(-87, 87, 8000), rng.uniform(-1, 1, 8000)]).astype(np.float32).reshape(-1, 16)
    np.testing.assert_allclose(compiled.run("exp", np.empty_like(x), x), np.exp(np.float64(x)), rtol=7e-6)


def test_masked_lanes_access_no_memory(compiled: Compiled) -> None:
    """The floats end at the start of a protected page: an access would crash the process."""
    page = mmap.PAGESIZE
    pages = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert protect(start + page, page, 0) == 0
    for count in range(17):
        floats = np.frombuffer(pages, np.float32, count, page - 4 * count)
        floats[:] = np.arange(count) + 1
        out = np.full(24, -1, np.float32)
        compiled.call("masked", count, out.ctypes.data, floats.ctypes.data)
        assert out.tolist() == [*range(1, count + 1), *[-1] * (24 - count)]
        floats[:] = 0
        compiled.call("masked", count, floats.ctypes.data, out.ctypes.data)
        assert floats.tolist() == [*range(1, count + 1)]
