"""The gated activation of an MLP on a GPU. Reference implementation: `reference.gated`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model_config import Gate
from quant.kernels.gating import gated_values

BLOCK = 1024  # columns per program


@triton.jit
def _gate_kernel(
    gate_up: tl.tensor,
    biases: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    first = tl.load(gate_up + token * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(gate_up + token * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    if biases is not None:
        bias = biases + tl.load(rows + token).to(tl.int64) * 2 * width + columns
        first += tl.load(bias, mask=inside, other=0.0)
        second += tl.load(bias + width, mask=inside, other=0.0)
    values = gated_values(first, second, GATE)
    tl.store(out + token * width + columns, values.to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, gate: Gate, biases: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
    """Return gate(first half) * second half of each row, computed in float32.

    `gate_up` [tokens, 2 * width] holds the gate projection, then the up projection. The row `rows[token]` of `biases`,
    float32 [number of biases, 2 * width], is added to it; `rows` is int32 [tokens]. Returns [tokens, width] of the same
    dtype.
    """
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    _gate_kernel[tokens, triton.cdiv(width, BLOCK)](gate_up, biases, rows, out, width, GATE=gate.value, BLOCK=BLOCK)
    return out
