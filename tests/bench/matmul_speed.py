"""Measure matrix products for each weight type on one thread, in bytes and in operations per second.

    python -m tests.bench.matmul_speed [--tier avx2] [TYPE ...]

For 1 and 4 tokens, the weights are read from memory: a ring of copies that is larger than the caches. For 128 tokens,
the weights stay in the cache. The read ceiling is the rate of loads of 64 bytes without arithmetic, on memory of the
same size. It is measured before and after the products.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba.core import cgutils

from engine.backends.cpu.code_cache import load_code
from quant.cpu import linear
from quant.cpu.activations import FORM_KERNELS, Form, row_bytes
from quant.cpu.arena import Arena
from quant.cpu.ggml_formats import GROUP
from quant.cpu.kernel import kernel
from quant.cpu.layouts import packing_of
from quant.cpu.linear import CpuBackend, CpuLinear
from quant.cpu.matmul import forms_of
from quant.cpu.native import address_of
from quant.cpu.tiers import CHOICES, choose
from quant.cpu.vector import I64, Emit, I8x64
from quant.tensor import QTensor
from tests.quant.cpu.kernel_call import call
from tests.quant.cpu.random_weights import EVERY, random_weight

ROWS, COLUMNS = 2048, 2048
RING_BYTES = 1 << 28
ROUNDS = 7


@kernel
def read_everything(e: Emit, at: Any, count: Any) -> Any:
    """Load `count` vectors. The result depends on all of them, so that no load is optimized away."""
    parts = [e.variable(e.load(at, I8x64)) for _ in range(4)]
    with cgutils.for_range(e.b, e.b.sdiv(count, I64(4))) as loop:
        for index, part in enumerate(parts):
            vector = e.load(e.at(e.at(at, loop.index, 256), 64 * index), I8x64)
            e.b.store(e.b.xor(e.b.load(part), vector), part)
    whole = e.b.load(parts[0])
    for part in parts[1:]:
        whole = e.b.xor(whole, e.b.load(part))
    return e.b.zext(e.b.extract_element(whole, I64(0)), I64)


def best(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest round."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def read_ceiling() -> float:
    """Return the read bandwidth of one thread in GB/s."""
    memory = np.ones(RING_BYTES, np.uint8)
    return RING_BYTES / best(lambda: call(read_everything, memory, RING_BYTES // 64)) / 1e9


def example(name: str) -> QTensor:
    return random_weight(name, ROWS, COLUMNS, np.random.default_rng(1))


def measure(layer: CpuLinear) -> str:
    (part,) = layer.parts
    copies = max(1, RING_BYTES // part.region.size)
    ring = np.tile(part.region.bytes, copies)
    form = layer.form(part)
    stride, groups = row_bytes(form, COLUMNS), COLUMNS // GROUP
    x, out = torch.randn(128, COLUMNS), torch.empty(128, ROWS)
    rows = torch.empty(128, stride, dtype=torch.uint8)
    linear._write_rows(address_of(FORM_KERNELS[form].write_row), x.data_ptr(), 128, groups, rows.data_ptr(), stride)

    def multiply(weight: int, tokens: int) -> None:
        linear._multiply(
            *part.tile_kernels(form), weight, part.tile_bytes, groups, ROWS,
            rows.data_ptr(), stride, tokens, out.data_ptr(), 4 * ROWS,
        )  # fmt: skip

    def multiply_ring(tokens: int) -> None:
        for copy in range(copies):
            multiply(ring.ctypes.data + copy * part.region.size, tokens)

    bandwidth = [copies * part.region.size / best(lambda n=n: multiply_ring(n)) / 1e9 for n in (1, 4)]  # type: ignore[misc]
    many = best(lambda: multiply(part.region.address, 128))
    operations = 2 * 128 * ROWS * COLUMNS / many / 1e9
    return f"{bandwidth[0]:6.1f} GB/s {bandwidth[1]:6.1f} GB/s {operations:6.0f} Gop/s"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the speed of matrix products for each weight type.")
    parser.add_argument("types", nargs="*", default=EVERY)
    parser.add_argument("--tier", default="auto", choices=CHOICES)
    arguments = parser.parse_args()
    tier = choose(arguments.tier)
    weights = {name: example(name) for name in arguments.types}
    load_code(None, tier, {packing_of(weight).layout for weight in weights.values()})
    print(f"{tier.tier}; read ceiling: {read_ceiling():.1f} GB/s")
    print("type                planes       1 token    4 tokens   128 tokens")
    for name, weight in weights.items():
        for form in reversed(forms_of(packing_of(weight).layout)):
            layer = CpuBackend(Arena(), form if form is Form.BITS_14 else Form.BITS_8).linear([weight])
            print(f"{name:20}{form.planes:5}   {measure(layer)}", flush=True)
    print(f"read ceiling: {read_ceiling():.1f} GB/s")


if __name__ == "__main__":
    main()
