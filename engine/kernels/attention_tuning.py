"""How attention is cut for each kind of card: what fits its registers and its shared memory, by compiling it.

Knows shapes. Refuses to know the kernels.
"""

from dataclasses import dataclass

from quant.kernels.card import Card

DECODE_ROWS = 16  # of a small tile: what the left operand of a matrix instruction has at least


@dataclass(frozen=True, slots=True)
class Tuning:
    """Of one shape of tile."""

    piece: int  # tokens of the context that are multiplied at a time
    warps: int
    stages: int  # of the pipeline: two for each piece on its way, its blocks and what is in them, and one that is used
    part: int  # tokens of a part, a multiple of the piece: at least, or exactly where parts are fixed
    merged_rows: int = 4  # that one program of the second kernel merges: one for each warp
    merged_parts: int = 8  # that are on their way to it at a time


def prompt_rows(columns: int, card: Card, *, deterministic: bool) -> int:
    """Rows of a large tile. Programs that merge parts themselves have fewer registers for them; so have those of large
    heads on cards whose matrix units have a memory of their own, from which sums are taken to be scaled."""
    if deterministic or (columns > 128 and card.architecture in APART):
        return 32
    return 128 if card.architecture in LARGE and columns <= 128 else 64


def tuning(rows: int, columns: int, card: Card, *, deterministic: bool) -> Tuning:
    """`rows` queries and `columns` elements of a head, both as they are padded."""
    if card.interpreted:
        return Tuning(piece=32, warps=4, stages=1, part=64, merged_rows=64, merged_parts=1)
    large = card.architecture in LARGE
    part = 1024 if deterministic else 128
    if rows <= DECODE_ROWS:
        return Tuning(8192 // max(columns, 64), 4, 5 if large else 3, part)
    return Tuning(64 if columns <= 128 else 32, 8, 3 if large else 2, part)


LARGE = (80, 90, 100)  # with more than 160 KiB of shared memory
APART = (100,)  # whose matrix units leave sums in a memory of their own
