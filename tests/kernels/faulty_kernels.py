"""Kernels that the ahead-of-time check must report, and one that passes.

python -m tests.kernels.faulty_kernels
"""

import sys
from typing import Any

import torch
import triton
import triton.language as tl

from quant.kernels.early_start import launch_options, wait_for_inputs
from tests.kernels.ahead_of_time import check_launches, report
from tests.kernels.cache_keys import order_dependent
from tests.kernels.calls import blank
from tests.kernels.cards import CARDS
from tests.kernels.launches import record_launches


@triton.jit
def _product_kernel(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    rows, columns, depth = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, DEPTH):
        left = tl.load(a + rows[:, None] * inner + start + depth[None, :])
        right = tl.load(b + (start + depth)[:, None] * COLUMNS + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * COLUMNS + columns[None, :], total)


@triton.jit
def _changing_kernel(out: tl.tensor, count: tl.tensor) -> None:
    total = count
    for _ in range(count):
        total = total * 0.5  # the type changes in the loop, which the interpreter accepts
    tl.store(out, total)


@triton.jit
def _hasty_kernel(x: tl.tensor, out: tl.tensor, EARLY: tl.constexpr) -> None:
    value = tl.load(x)
    wait_for_inputs(EARLY)
    tl.store(out, value)


SHARED = tl.constexpr(3)


@triton.jit
def _part(value: tl.tensor) -> tl.tensor:
    return value + SHARED


@triton.jit
def _first_kernel(out: tl.tensor) -> None:
    tl.store(out, _part(1))


@triton.jit
def _second_kernel(out: tl.tensor) -> None:
    tl.store(out, _part(2))


def product(rows: int, columns: int, depth: int, **options: Any) -> None:
    inner = 4096
    out = blank(rows, columns, dtype=torch.float32)
    a, b = blank(rows, inner), blank(inner, columns)
    _product_kernel[1,](a, b, out, inner, ROWS=rows, COLUMNS=columns, DEPTH=depth, **options)


def main() -> int:
    ampere, hopper = CARDS[0], CARDS[3]
    with record_launches() as launches:
        product(64, 64, 32, num_warps=4, num_stages=2)
        product(256, 128, 32, num_warps=2, num_stages=2)  # 256 accumulators per thread
        product(128, 128, 128, num_warps=8, num_stages=5)  # 5 stages of 64 KiB
        _changing_kernel[1,](blank(1), 5)
    jobs = [(launch, ampere) for launch in launches.values()]
    with record_launches() as launches:
        _hasty_kernel[1,](blank(1), blank(1), **launch_options(early=True))
    good = report(check_launches([*jobs, *((launch, hopper) for launch in launches.values())]))
    print(f"order: {order_dependent([_part, _first_kernel, _second_kernel, _hasty_kernel])}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
