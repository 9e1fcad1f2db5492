"""Store the results of a product as float32 or as bfloat16, chosen at run time.

Triton would compile a kernel once for each type of its result, and a product is the same for both.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def store_result(
    out: tl.tensor,
    starts: tl.tensor,
    row: tl.tensor,
    values: tl.tensor,
    kept: tl.tensor,
    add: tl.tensor,
    rounded: tl.tensor,
) -> None:
    """Store float32 `values` at the elements `starts` + `row` of `out`, or add them to float32 elements.

    `starts` is int64. `out`, `add`, and `rounded` are those of `result_operands`. Only the values in `kept` are stored.
    """
    # Each branch computes its addresses: those of both, computed before, would take twice the registers of the values.
    if rounded:
        halves = out.to(tl.pointer_type(tl.bfloat16), bitcast=True)
        tl.store(halves + (starts + row), values.to(tl.bfloat16), mask=kept)
    else:
        at = out + (starts + row)
        if add:
            values += tl.load(at, mask=kept, other=0.0)
        tl.store(at, values, mask=kept)


def result_operands(out: Tensor, *, add: bool = False) -> dict[str, Any]:
    """Return the arguments of a kernel that stores to `out`, bfloat16 or float32, with `store_result`.

    A kernel gets the address of either type as that of float32. Raises TypeError for other types, and if results are
    added to bfloat16.
    """
    if out.dtype == torch.float32:
        return {"out": out, "add": int(add), "rounded": 0}
    if out.dtype != torch.bfloat16 or add:
        raise TypeError(f"a product cannot be {'added to' if add else 'stored as'} {out.dtype}; use torch.float32")
    return {"out": triton.reinterpret(out, torch.float32), "add": 0, "rounded": 1}
