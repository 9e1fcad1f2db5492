"""Sampled tokens as the input of the next step, on a GPU: what the host has not seen yet is put where it is read.

The twin is an assignment by index.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # tokens of one program


@triton.jit(do_not_specialize=["count"])
def _feed_kernel(
    sampled: tl.tensor, rows: tl.tensor, places: tl.tensor, token_ids: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + index, mask=index < count, other=-1)
    token_id = tl.load(sampled + tl.load(rows + index, mask=place >= 0, other=0), mask=place >= 0, other=0)
    tl.store(token_ids + place, tl.maximum(token_id, 0), mask=place >= 0)


def feed(sampled: Tensor, rows: Tensor, places: Tensor, token_ids: Tensor) -> None:
    """token_ids[places] = sampled[rows], in place and without waiting for the device.

    sampled, token_ids int64; rows, places int32 [n], a negative place: nowhere, so that lists can be padded. Where no
    token was sampled (see `NOT_A_NUMBER`), it is token 0, which exists: that request fails when the host learns of it.
    """
    _feed_kernel[(triton.cdiv(len(rows), BLOCK),)](sampled, rows, places, token_ids, len(rows), BLOCK=BLOCK)
