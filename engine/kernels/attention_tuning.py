"""Tile and pipeline sizes of the attention kernels for each GPU architecture.

They are the largest sizes that fit registers and shared memory, found by compiling the kernels. Those of Hopper cards
are the fastest of about ten, measured on an H200.
"""

from dataclasses import dataclass

from quant.kernels.card import Card

DECODE_ROWS = 16  # rows of a small tile: the left operand of a matrix instruction has at least 16 rows


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch parameters for one tile shape."""

    piece: int  # context tokens per inner loop iteration
    warps: int
    # number of stages of the software pipeline: two for each piece in flight (block ids, then their contents), and one
    # for the current piece
    stages: int
    # context tokens per part, a multiple of `piece`; a minimum unless parts have a fixed length
    part: int
    merged_rows: int = 4  # rows per program of the merge kernel, one per warp
    merged_parts: int = 8  # number of parts that the merge kernel loads at a time
    arrived_parts: int = 2  # number of parts that the last program of a small tile loads at a time


def prompt_rows(columns: int, card: Card, *, deterministic: bool) -> int:
    """Return the number of rows of a large tile.

    Programs that merge parts themselves have fewer registers left for rows. The same applies to large heads on GPUs
    with tensor memory, because accumulators are loaded from there into registers to be scaled, and to heads of more
    than 256 elements on all GPUs.
    """
    if deterministic and columns > 256:
        return DECODE_ROWS
    if deterministic or columns > 256 or (columns > 128 and card.capability[0] == TENSOR_MEMORY):
        return 32
    return 128 if card.shared_memory > LARGE_SHARED_MEMORY and columns <= 128 else 64


def tuning(rows: int, columns: int, card: Card, *, deterministic: bool) -> Tuning:
    """Return the launch parameters for `rows` rows and `columns` elements per head, both after padding."""
    if card.interpreted:
        return Tuning(piece=32, warps=4, stages=1, part=64, merged_rows=64, merged_parts=1)
    large = card.shared_memory > LARGE_SHARED_MEMORY
    part = 1024 if deterministic else 128
    if rows <= DECODE_ROWS:
        return Tuning((16384 if large else 8192) // max(columns, 64), 4 if columns <= 256 else 8, 3, part)
    if card.capability[0] == HOPPER and columns <= 128:
        return Tuning(64, 4, 3, part)  # one warp group with 128 rows
    piece = 64 if columns <= 128 else 32 if columns <= 256 or large else 16
    return Tuning(piece, 8, 3 if large else 2, part)


LARGE_SHARED_MEMORY = 160 << 10  # bytes; cards have either 99 KiB, or 163 KiB and more
HOPPER = 9  # major version of the compute capability
TENSOR_MEMORY = 10  # major version of the compute capability in which matrix units accumulate in tensor memory
