"""The activation of encoders' MLPs on a GPU: GELU by the error function (arXiv:1606.08415). The twin is torch's `gelu`.

The floor is the traffic: each element is read and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of one program


@triton.jit(do_not_specialize=["count"])
def _gelu_kernel(x: tl.tensor, out: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    result = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


def gelu(x: Tensor) -> Tensor:
    """x of any shape and float type, contiguous -> the same shape and type, computed in float32."""
    out = torch.empty_like(x)
    _gelu_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK, num_warps=8)
    return out
