"""The logits of a step on a GPU, with what sampling needs of them for any request: their largest values.

They are found as part of the step, so a CUDA graph includes the first pass over the logits, and the tokens of greedy
requests.
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
    greedy: Tensor  # int64 [R]: the most likely token, the first of equal ones; NOT_A_NUMBER if a logit is NaN

    @classmethod
    def over(cls, values: Tensor) -> Self:
        """Return logits with memory for their largest values, which are not found yet."""
        greedy = torch.empty(len(values), dtype=torch.int64, device=values.device)
        return cls(values, Maxima.empty(values), greedy)

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Return logits with their largest values."""
        logits = cls.over(values)
        logits.find()
        return logits

    def first(self, rows: int) -> Self:
        """Return the first rows, without copying them."""
        return self._replace(
            values=self.values[:rows], maxima=Maxima(*(it[:rows] for it in self.maxima)), greedy=self.greedy[:rows]
        )

    def find(self) -> None:
        """Launch the kernels that find the largest values."""
        if not len(self.values):
            return
        sizes = ChunkSizes.of(self.values.shape[1])
        find_maxima(self.values, self.maxima)
        _greedy_kernel[(len(self.values),)](
            self.maxima.peaks, sizes.chunks, self.greedy, CHUNKS=CHUNKS, ID_BITS=sizes.id_bits, num_warps=1
        )
