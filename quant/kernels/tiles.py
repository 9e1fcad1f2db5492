"""How products are cut into programs: by rule, or as it was measured on a card.

Knows shapes and cards. Refuses to know kernels' insides: a `ProductTile` is all that they are told.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quant.kernels.card import Card

TOKENS = (2, 8, 16, 32)  # up to which tiles differ
FIXED_TOKENS = 16  # whatever the batch, where a row's bits must not depend on it
MOST_TOKENS = 256  # beyond, a whole matrix is unpacked for the library's product
LEAST_WARPS = 16  # of a multiprocessor, which wait for memory in turn
LARGE = 1 << 25  # weights, from which on it pays that a second launch adds the sums of several programs
ROWS, WARPS, TILE_TOKENS, SPLITS = (16, 32), (1, 2, 4, 8, 16), (8, 16, 32), (1, 2, 4)  # that tiles can have
IDLE = 1.1  # as much as the busiest multiprocessor may have more to do than all on average


@dataclass(frozen=True, slots=True)
class ProductTile:
    """How a product is cut into programs."""

    rows: int = 32  # of a program, one of `ROWS`
    warps: int = 4  # which share a row's columns, one of `WARPS`
    tokens: int = 16  # of a program, one of `TILE_TOKENS`
    splits: int = 1  # programs that share a row's columns, one of `SPLITS`


@dataclass(frozen=True, slots=True)
class ProductShape:
    """What a choice depends on."""

    kind: str  # of weights: bits and group
    outputs: int
    inputs: int
    tokens: int  # rounded up to `TOKENS`


MeasuredTiles = Mapping[ProductShape, ProductTile]


@dataclass(frozen=True, slots=True)
class TileTable:
    """The tiles of one card: measured ones, and those that a rule gives for all other shapes."""

    card: Card
    measured: MeasuredTiles

    def product(self, kind: str, outputs: int, inputs: int, tokens: int, *, deterministic: bool) -> ProductTile:
        """The tile for so many tokens. Where `deterministic`, it does not depend on them."""
        wanted = FIXED_TOKENS if deterministic else next((it for it in TOKENS if it >= tokens), TOKENS[-1])
        shape = ProductShape(kind, outputs, inputs, wanted)
        return self.measured[shape] if shape in self.measured else self._by_rule(shape)

    def _by_rule(self, shape: ProductShape) -> ProductTile:
        processors, columns = self.card.multiprocessors, shape.inputs // 128
        # More rows share what is loaded of x; fewer need fewer registers, so that more loads are under way.
        rows = 32 if shape.tokens > 2 and shape.outputs >= 32 * processors * 3 // 4 else 16
        programs = -(-shape.outputs // rows)
        warps = next((it for it in (4, 8) if programs * it >= LEAST_WARPS * processors), 16 if rows == 16 else 8)
        while warps > 1 and warps > columns:
            warps //= 2
        splits = 1
        if shape.outputs * shape.inputs >= LARGE:
            splits = next((it for it in (1, 2, 4) if _balanced(programs * it, processors)), 4)
        return ProductTile(rows, warps, max(8, shape.tokens), splits)


def _balanced(programs: int, processors: int) -> bool:
    most = -(-programs // processors)
    return most * processors <= IDLE * programs
