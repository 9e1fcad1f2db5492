"""Find the fastest tile of a product by timing candidates."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

from quant.kernels.card import Card
from quant.kernels.tiles import AHEAD, BATCH_ROWS, ROWS, SPLITS, STAGES, WARPS, ProductShape, ProductTile, TileTable

Seconds = Callable[[ProductTile], float | None]  # seconds of one product; None if the tile does not run
# a tile replaces the rule's tile only if it takes at most this share of its time; smaller gains may be noise
GAIN = 0.97
BATCH_WARPS = (4, 8)
MOST_SUMS = 256  # limit of rows times warps, because their sums are added in shared memory


def fastest_tile(shape: ProductShape, card: Card, seconds: Seconds) -> ProductTile:
    """Return the fastest tile, or the rule's tile if none is clearly faster.

    A tile is compiled before it is timed, which takes a second. So rows and warps are tried first, and then, with the
    best of those, the number of programs that share a row's columns, and the stages.
    """
    rule = rule_tile(shape, card)
    times = {rule: _timed(rule, seconds)}

    def best_of(tiles: Iterable[ProductTile]) -> ProductTile:
        for tile in tiles:
            if tile not in times and _is_usable(tile, shape):
                times[tile] = _timed(tile, seconds)
        return min(times, key=times.__getitem__)

    all_rows = BATCH_ROWS if rule.rows in BATCH_ROWS else ROWS
    best = best_of(replace(rule, rows=rows, warps=warps) for rows, warps in product(all_rows, WARPS))
    if not shape.experts and not shape.is_row:
        best = best_of(replace(best, splits=splits) for splits in SPLITS)
    best = best_of(replace(best, stages=stages) for stages in STAGES)
    return best if times[best] <= GAIN * times[rule] else rule


def rule_tile(shape: ProductShape, card: Card) -> ProductTile:
    return TileTable(card, {}).by_rule(shape)


def _is_usable(tile: ProductTile, shape: ProductShape) -> bool:
    """Whether every warp has work, and the warps' sums and the weights in flight fit into shared memory."""
    if tile.rows in BATCH_ROWS:
        return tile.warps in BATCH_WARPS and tile.splits <= max(1, shape.inputs // 128)
    fits = tile.rows * tile.warps <= MOST_SUMS and (tile.stages == 1 or (shape.tokens == 1 and tile.warps <= AHEAD[0]))
    return fits and tile.warps * tile.splits <= max(1, shape.inputs // 128)


def _timed(tile: ProductTile, seconds: Seconds) -> float:
    taken = seconds(tile)
    return float("inf") if taken is None else taken
