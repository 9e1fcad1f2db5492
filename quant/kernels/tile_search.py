"""The fastest tile of a product, found by trying.

Refuses to know how a product is timed, and where what was found is kept.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

from quant.kernels.card import Card
from quant.kernels.tiles import ROWS, SPLITS, WARPS, ProductShape, ProductTile, TileTable

Seconds = Callable[[ProductTile], float | None]  # of one product; None: it does not run
GAIN = 0.97  # of the rule's time that a tile must take at most to replace it: less may be chance
MOST_SUMS = 256  # rows times warps, all of which meet in shared memory


def fastest_tile(shape: ProductShape, card: Card, seconds: Seconds) -> ProductTile:
    """The rule's, where none is clearly faster.

    A tile is compiled before it is timed, which takes a second. So rows and warps are tried first, then the number of
    programs that share a row's columns, with the best of those.
    """
    rule = rule_tile(shape, card)
    times = {rule: _timed(rule, seconds)}

    def best_of(tiles: Iterable[ProductTile]) -> ProductTile:
        for tile in tiles:
            if tile not in times and _makes_sense(tile, shape):
                times[tile] = _timed(tile, seconds)
        return min(times, key=times.__getitem__)

    best = best_of(replace(rule, rows=rows, warps=warps) for rows, warps in product(ROWS, WARPS))
    best = best_of(replace(best, splits=splits) for splits in SPLITS)
    return best if times[best] <= GAIN * times[rule] else rule


def rule_tile(shape: ProductShape, card: Card) -> ProductTile:
    return TileTable(card, {}).product(shape.kind, shape.outputs, shape.inputs, shape.tokens, deterministic=False)


def _makes_sense(tile: ProductTile, shape: ProductShape) -> bool:
    """There is work for every warp."""
    return tile.warps * tile.splits <= max(1, shape.inputs // 128) and tile.rows * tile.warps <= MOST_SUMS


def _timed(tile: ProductTile, seconds: Seconds) -> float:
    taken = seconds(tile)
    return float("inf") if taken is None else taken
