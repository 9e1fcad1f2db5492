"""Passes over rows of logits by many programs: each program reads one chunk of one row.

A row of 128,256 logits has 32 chunks, which are read at once by as many multiprocessors. Programs share no results:
each writes its own entries, and a later launch combines them.

A chunk has groups of tokens, of which the largest logit is kept. A shortlist is then found without reading the whole
row again (see `engine.kernels.shortlist`). Tokens with similar ids are often likely together, so the tokens of a group
are spread over its chunk, in runs of 32 bytes of logits, the unit of memory accesses.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.row_passes import logit_of, scale_of, to_ordered_ints, weights_of
from engine.kernels.sampling_rows import Draws
from engine.sampling.drawing import SMALLEST_TEMPERATURE

NAN_KEY = tl.constexpr(0x7FFFFFFF)  # the key of NaN, larger than that of any number
BLOCK = 4096  # minimum number of logits in a chunk, if the row has as many
CHUNKS = 64  # maximum number of chunks per row
GROUPS = 64  # maximum number of groups per chunk
# minimum number of bits for the token id in a rank, equal for most vocabularies, so that they share one compiled kernel
ID_BITS = 20
WARPS = 8


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """The sizes of the chunks of a vocabulary."""

    block: int  # tokens per chunk, a power of two
    groups: int  # groups per chunk, a power of two
    chunks: int  # chunks of the vocabulary, at most CHUNKS
    id_bits: int  # see `engine.kernels.row_passes.rank_of`

    @classmethod
    def of(cls, vocabulary: int) -> Self:
        padded = triton.next_power_of_2(vocabulary)
        block = min(padded, max(BLOCK, padded // CHUNKS))
        id_bits = max(ID_BITS, (vocabulary - 1).bit_length())
        return cls(block, min(GROUPS, block), triton.cdiv(vocabulary, block), id_bits)


class Maxima(NamedTuple):
    """The largest logits of R rows. 0.0 and -0.0 are equal."""

    peaks: Tensor  # int64 [R, chunks]: rank of each chunk's most likely token; NaN is above all numbers
    groups: Tensor  # int32 [R, chunks * groups]: largest logit of each group, as an ordered integer

    @classmethod
    def empty(cls, logits: Tensor) -> Self:
        """Return uninitialized memory for the maxima of logits [R, vocabulary]."""
        sizes, count, device = ChunkSizes.of(logits.shape[1]), len(logits), logits.device
        return cls(
            torch.empty(count, sizes.chunks, dtype=torch.int64, device=device),
            torch.empty(count, sizes.chunks * sizes.groups, dtype=torch.int32, device=device),
        )


@triton.jit
def _maxima_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    peaks: tl.tensor,
    groups: tl.tensor,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> None:
    index, chunk = tl.program_id(0), tl.program_id(1)
    row = logits + index.to(tl.int64) * stride
    numbers, members = tl.arange(0, GROUPS), tl.arange(0, BLOCK // GROUPS)
    ids = id_in_group(chunk * GROUPS + numbers[:, None], members[None, :], BLOCK, GROUPS)
    values = tl.load(row + ids, mask=ids < vocabulary, other=-float("inf"))
    keys = tl.where(values == values, to_ordered_ints(values), NAN_KEY)
    best = tl.max(keys, 1)
    peak = tl.max(best)
    lowest = tl.min(tl.min(tl.where(keys == peak, ids, (1 << ID_BITS) - 1), 1))
    entry = index * tl.num_programs(1) + chunk
    tl.store(peaks + entry, (peak.to(tl.int64) << ID_BITS) + ((1 << ID_BITS) - 1 - lowest))
    tl.store(groups + entry * GROUPS + numbers, best)


@triton.jit
def id_in_group(group: tl.tensor, member: tl.tensor, BLOCK: tl.constexpr, GROUPS: tl.constexpr) -> tl.tensor:
    """Return the id of the token at index `member`, below BLOCK / GROUPS, of a group of the row."""
    run: tl.constexpr = min(8, BLOCK // GROUPS)  # consecutive tokens
    chunk, place = group // GROUPS, group % GROUPS
    return chunk * BLOCK + (member // run * GROUPS + place) * run + member % run


@triton.jit
def _weights_kernel(
    logits: tl.tensor,
    sources: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    peaks: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    top_ks: tl.tensor,
    sums: tl.tensor,
    COOLEST: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> None:
    index, chunk, count = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperatures + index)
    total = 0.0
    # a draw with top-k never uses the weight of the whole row
    if (temperature > 0) & (tl.load(top_ks + index) >= vocabulary):
        source = tl.load(sources + index).to(tl.int64)
        row = logits + source * stride
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(row + ids, mask=ids < vocabulary, other=-float("inf"))
        peak = logit_of(top_rank(peaks + source * count, count, CHUNKS), ID_BITS)
        total = tl.sum(weights_of(values, peak, scale_of(temperature, COOLEST), tl.load(min_ps + index)))
    tl.store(sums + index * count + chunk, total)


@triton.jit
def top_rank(peaks: tl.tensor, count: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    """Return the rank of a row's most likely token, given those of its `count` chunks."""
    chunks = tl.arange(0, CHUNKS)
    # the first chunk is there in every row
    return tl.max(tl.load(peaks + tl.where(chunks < count, chunks, 0)))


@triton.jit
def load_sums(sums: tl.tensor, count: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    """Return the weights of a row's `count` chunks, float32 [CHUNKS]."""
    chunks = tl.arange(0, CHUNKS)
    return tl.load(sums + chunks, mask=chunks < count, other=0.0)


def find_maxima(logits: Tensor, maxima: Maxima) -> None:
    """Write the maxima of float32 logits [R, vocabulary]. If logits are equal, the peak has the lowest id."""
    sizes = ChunkSizes.of(logits.shape[1])
    _maxima_kernel[(len(logits), sizes.chunks)](
        logits, logits.stride(0), logits.shape[1], *maxima,
        BLOCK=sizes.block, GROUPS=sizes.groups, ID_BITS=sizes.id_bits, num_warps=WARPS,
    )  # fmt: skip


def chunk_weights(logits: Tensor, maxima: Maxima, draws: Draws) -> Tensor:
    """Return the weight of each chunk of the rows `draws.sources` of the logits, float32 [rows, chunks].

    `maxima` are those of all logits. The weights of greedy rows and of those with top-k are zeros.
    """
    sizes = ChunkSizes.of(logits.shape[1])
    sums = torch.empty(len(draws.sources), sizes.chunks, dtype=torch.float32, device=logits.device)
    _weights_kernel[tuple(sums.shape)](
        logits, draws.sources, logits.stride(0), logits.shape[1],
        maxima.peaks, draws.temperature, draws.min_p, draws.top_k, sums,
        COOLEST=SMALLEST_TEMPERATURE, BLOCK=sizes.block, CHUNKS=CHUNKS, ID_BITS=sizes.id_bits, num_warps=WARPS,
    )  # fmt: skip
    return sums
