"""Copy sampled tokens into the token ids of the next step on a GPU, before the host knows them.

Reference implementation: an indexed assignment.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # tokens per program


@triton.jit(do_not_specialize=["count"])
def _fill_pending_kernel(
    sampled: tl.tensor, rows: tl.tensor, indices: tl.tensor, token_ids: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + entry, mask=entry < count, other=-1)
    token_id = tl.load(sampled + tl.load(rows + entry, mask=index >= 0, other=0), mask=index >= 0, other=0)
    tl.store(token_ids + index, tl.maximum(token_id, 0), mask=index >= 0)


def fill_pending_tokens(sampled: Tensor, rows: Tensor, indices: Tensor, token_ids: Tensor) -> None:
    """Set token_ids[indices] = sampled[rows] in place, without waiting for the device.

    `sampled` and `token_ids` are int64; `rows` and `indices` are int32 [n]. Entries with a negative index are padding
    and ignored. If no token was sampled (NOT_A_NUMBER), token 0 is used, which every vocabulary has: the request fails
    when the host reads the result.
    """
    _fill_pending_kernel[(triton.cdiv(len(rows), BLOCK),)](sampled, rows, indices, token_ids, len(rows), BLOCK=BLOCK)
