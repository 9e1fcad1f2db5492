"""Gated short convolutions on a GPU (LFM2, arXiv:2511.23404). Reference implementation: `reference.short_convolution`.

A program computes some tokens of a request for a strip of channels; the programs of its first tokens also write the
state. The inputs of earlier tokens are computed again from their rows, which are in the cache. Lower bound: memory
traffic. Each row is read once and a third of it is written: 34 MB for 4096 tokens of 1024 channels, or 10 us on an
H100.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 16  # of a program; at least the number of taps, so that only the first program of a request reads its state
CHANNELS = 128


@triton.jit(do_not_specialize=["width"])
def _short_convolution_kernel(
    rows: tl.tensor,
    pool: tl.tensor,
    tables: tl.tensor,
    query_starts: tl.tensor,
    context_lengths: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    PLAIN: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    request, part = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_starts + request).to(tl.int64)
    count = tl.load(query_starts + request + 1) - first
    if part * TOKENS >= count:
        return
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < width
    source = pool + tl.load(tables + request * table_stride).to(tl.int64) * block_stride
    target_block = tl.load(tables + request * table_stride + 1)
    target = pool + target_block.to(tl.int64) * block_stride

    token = part * TOKENS + tl.arange(0, TOKENS)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        at = token - (TAPS - 1) + tap
        row = rows + (first + at)[:, None] * row_stride + channel[None, :]
        here = ((at >= 0) & (at < count))[:, None] & inside[None, :]
        inputs = tl.load(row, mask=here, other=0.0).to(tl.float32)
        if not PLAIN:
            inputs *= tl.load(row + 2 * width, mask=here, other=0.0).to(tl.float32)
        past = source + (at + TAPS - 1)[:, None] * width + channel[None, :]
        inputs += tl.load(past, mask=(at < 0)[:, None] & inside[None, :], other=0.0)
        total += inputs * tl.load(weight + tap * width + channel, mask=inside, other=0.0)[None, :]
    live = (token < count)[:, None] & inside[None, :]
    if PLAIN:
        total *= tl.sigmoid(total)
    else:
        gate = rows + (first + token)[:, None] * row_stride + width + channel[None, :]
        total *= tl.load(gate, mask=live, other=0.0).to(tl.float32)
    written = out + (first + token)[:, None] * width + channel[None, :]
    tl.store(written, total.to(out.dtype.element_ty), mask=live)

    # Padding requests have stale tables, and the null block must stay zero.
    if part == 0 and tl.load(context_lengths + request) > 0 and target_block != 0:
        for kept in tl.static_range(TAPS - 1):
            last = count - (TAPS - 1) + kept
            last_row = rows + (first + last) * row_stride + channel
            computed = inside & (last >= 0)
            values = tl.load(last_row, mask=computed, other=0.0).to(tl.float32)
            if not PLAIN:
                values *= tl.load(last_row + 2 * width, mask=computed, other=0.0).to(tl.float32)
            values += tl.load(source + (last + TAPS - 1) * width + channel, mask=inside & (last < 0), other=0.0)
            tl.store(target + kept * width + channel, values, mask=inside)


def short_convolution(
    rows: Tensor,
    pool: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    weight: Tensor,
    *,
    plain: bool = False,
) -> Tensor:
    """Return c * convolution(b * x) of every token, where b, c, and x are the thirds of its row, and update the states.

    With `plain`, return y * sigmoid(y), where y is the convolution of the row itself.

    - rows: bfloat16 or float32 [tokens, 3 * width], or [tokens, at least width] with `plain`
    - pool: float32 [blocks, at least (taps - 1) * width]: states, the last inputs of the convolution, oldest first.
      Blocks may be any distance apart
    - tables: int32 [requests, at least 2]: the state that is read, and the one that is written. They must differ. The
      null block is never written
    - query_starts: int32 [requests + 1]: the first token of each request
    - context_lengths: int32 [requests]; 0: a padding request, whose state is not written
    - weight: float32 [taps, width]; the last row is for the token itself

    Returns [tokens, width], in the type of the rows.
    """
    tokens, (taps, width) = len(rows), weight.shape
    if taps > TOKENS:
        raise ValueError(f"{taps} taps; the kernel supports at most {TOKENS}")
    out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    grid = len(context_lengths), triton.cdiv(tokens, TOKENS), triton.cdiv(width, CHANNELS)
    _short_convolution_kernel[grid](
        rows,
        pool,
        tables,
        query_starts,
        context_lengths,
        weight,
        out,
        width,
        rows.stride(0),
        pool.stride(0),
        tables.stride(0),
        PLAIN=plain,
        TAPS=taps,
        TOKENS=TOKENS,
        CHANNELS=CHANNELS,
        num_warps=4,
    )
    return out
