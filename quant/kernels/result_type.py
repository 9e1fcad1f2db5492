"""Store the results of a product as float32 or as bfloat16, chosen at run time.

Triton would compile a kernel once for each type of its result, and a product is the same for both.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.token_tiles import slots_of_tile

MOST_RESULTS = 2**31 - 1  # elements of the results of all experts, which kernels count in 32 bits


@triton.jit
def store_result(
    out: tl.tensor,
    first: tl.tensor,
    at: tl.tensor,
    values: tl.tensor,
    kept: tl.tensor,
    add: tl.tensor,
    rounded: tl.tensor,
) -> None:
    """Store float32 `values` at the elements `first` + `at` of `out`, or add them to float32 elements.

    `first` is one number. `out`, `add`, and `rounded` are those of `result_operands`. Only the values in `kept` are
    stored.
    """
    if rounded == 0:
        wholes = out + first + at
        before = tl.load(wholes, mask=kept & (add != 0), other=0.0)  # a branch would take more registers
        tl.store(wholes, values + before, mask=kept)
    else:
        halves = out.to(tl.pointer_type(tl.bfloat16), bitcast=True) + first
        tl.store(halves + at, values.to(tl.bfloat16), mask=kept)


@triton.jit
def store_tile(
    out: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    out_stride: tl.tensor,
    split_stride: tl.tensor,
    add: tl.tensor,
    rounded: tl.tensor,
    TOKENS: tl.constexpr,
) -> None:
    """Add `bias` to `sums`, [n, TOKENS], and store them for the program's tile of tokens (`slots_of_tile`).

    `row`: [n, 1], of which those below `rows` exist. The results of a tile, and of all experts, are within 2**31
    elements: offsets of 64 bits would take twice the registers of the sums.
    """
    tile, index = tl.program_id(1), tl.arange(0, TOKENS)[None, :]
    token = slots_of_tile(experts, slots, tile, index, tokens, TOKENS)
    if bias is not None:
        sums += tl.load(bias + row, mask=row < rows, other=0.0)
    first = tl.program_id(2).to(tl.int64) * split_stride
    if experts is None:
        first += (tile * TOKENS).to(tl.int64) * out_stride
        at = index * out_stride + row
    else:
        at = token * out_stride + row
    store_result(out, first, at, sums, (row < rows) & (token < tokens), add, rounded)


def result_operands(out: Tensor, *, add: bool = False, routed: bool = False) -> dict[str, Any]:
    """Return the arguments of a kernel that stores to `out`, bfloat16 or float32, with `store_result`.

    A kernel gets the address of either type as that of float32. Raises TypeError for other types, and if results are
    added to bfloat16, and ValueError if results of experts (`routed`) take more than MOST_RESULTS elements.
    """
    if routed and (size := out.shape[-2] * out.stride(-2)) > MOST_RESULTS:
        raise ValueError(f"results of experts take {size:,} elements, of at most {MOST_RESULTS:,}; use fewer tokens")
    if out.dtype == torch.float32:
        return {"out": out, "add": int(add), "rounded": 0}
    if out.dtype != torch.bfloat16 or add:
        raise TypeError(f"a product cannot be {'added to' if add else 'stored as'} {out.dtype}; use torch.float32")
    return {"out": triton.reinterpret(out, torch.float32), "add": 0, "rounded": 1}
