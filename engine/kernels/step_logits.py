"""The logits of a step on a GPU, with the results that are found as part of the step: their largest values, and tokens.

A CUDA graph includes the draws of requests that need nothing but the logits.
"""

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.chunk_passes import CHUNKS, ChunkSizes, Maxima, find_maxima, top_rank
from engine.kernels.row_passes import id_of, logit_of


@triton.jit
def _greedy_kernel(
    peaks: tl.tensor, count: tl.tensor, tokens: tl.tensor, CHUNKS: tl.constexpr, ID_BITS: tl.constexpr
) -> None:
    index = tl.program_id(0)
    rank = top_rank(peaks + index * count, count, CHUNKS)
    peak = logit_of(rank, ID_BITS)
    tl.store(tokens + index, tl.where(peak == peak, id_of(rank, ID_BITS), -1).to(tl.int64))


class StepLogits(NamedTuple):
    """Logits of R rows, each of them contiguous."""

    values: Tensor  # float32 [R, vocabulary]
    maxima: Maxima
    # int64 [R]: the drawn token, or the most likely one, the first of equal ones; NOT_A_NUMBER if a logit is NaN
    tokens: Tensor
    is_drawn: bool = False  # whether `tokens` were drawn; greedy draws give the most likely token

    @classmethod
    def over(cls, values: Tensor) -> Self:
        """Return logits with memory for their largest values, which are not found yet."""
        tokens = torch.empty(len(values), dtype=torch.int64, device=values.device)
        return cls(values, Maxima.empty(values), tokens)

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Return logits with their largest values, and the most likely tokens."""
        logits = cls.over(values)
        if len(values):
            find_maxima(values, logits.maxima)
            sizes = ChunkSizes.of(values.shape[1])
            _greedy_kernel[(len(values),)](
                logits.maxima.peaks, sizes.chunks, logits.tokens, CHUNKS=CHUNKS, ID_BITS=sizes.id_bits, num_warps=1
            )
        return logits

    def first(self, rows: int) -> Self:
        """Return the first rows, without copying them."""
        return self._replace(
            values=self.values[:rows], maxima=Maxima(*(it[:rows] for it in self.maxima)), tokens=self.tokens[:rows]
        )
