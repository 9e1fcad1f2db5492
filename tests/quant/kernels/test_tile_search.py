"""The search for the fastest tile, and the gain that it requires."""

from dataclasses import replace

from quant.kernels.tile_search import fastest_tile, rule_tile
from quant.kernels.tiles import ProductShape, ProductTile
from tests.kernels.cards import CARDS

CARD = CARDS[3]
SHAPE = ProductShape("q4", 4096, 4096, 8)
RULE = rule_tile(SHAPE, CARD)


def test_fastest_tile_is_chosen() -> None:
    best = replace(RULE, rows=48 - RULE.rows, warps=8 if RULE.warps == 4 else 4)
    assert fastest_tile(SHAPE, CARD, lambda tile: 1.0 if tile == best else 2.0) == best
    assert fastest_tile(SHAPE, CARD, lambda tile: 1.0 if tile == RULE else 2.0) == RULE


def test_splits_are_chosen_if_faster() -> None:
    def seconds(tile: ProductTile) -> float:
        return 1.0 + (tile.rows != 16) + (tile.warps != 2) - 0.25 * (tile.splits == 4)

    assert fastest_tile(SHAPE, CARD, seconds) == replace(RULE, rows=16, warps=2, splits=4)


def test_default_tile_is_kept_if_the_gain_is_small() -> None:
    assert fastest_tile(SHAPE, CARD, lambda tile: 1.0 if tile == RULE else 0.98) == RULE
    assert fastest_tile(SHAPE, CARD, lambda tile: 1.0 if tile == RULE else 0.96) != RULE


def test_tiles_that_do_not_run_are_not_chosen() -> None:
    assert fastest_tile(SHAPE, CARD, lambda tile: 1.0 if tile == RULE else None) == RULE
    assert fastest_tile(SHAPE, CARD, lambda tile: None if tile == RULE else 1.0) != RULE
    assert fastest_tile(SHAPE, CARD, lambda _: None) == RULE


def test_experts_have_the_tile_of_one_matrix_with_as_many_programs_and_no_splits() -> None:
    experts = ProductShape("q4", 300, 1 << 15, 1, experts=8)
    whole = rule_tile(ProductShape("q4", 8 * 300, 1 << 15, 1), CARD)
    assert rule_tile(experts, CARD) == replace(whole, splits=1) != whole
    assert fastest_tile(experts, CARD, lambda tile: 1.0 / tile.splits).splits == 1


def test_large_batches_fit_the_shared_memory_of_every_card() -> None:
    """Codes in two planes take 57 KB with 64 rows and 2 stages, and 131 KB with 128 rows and 3 stages."""
    shape = ProductShape("q6", 4096, 4096, 128, few_tokens=8)
    for card in CARDS:
        tile = rule_tile(shape, card)
        assert (tile.rows, tile.stages) == ((128, 3) if card.capability[0] in (9, 10) else (64, 2))


def test_every_warp_has_work_and_each_tile_is_timed_once() -> None:
    timed: list[ProductTile] = []

    def seconds(tile: ProductTile) -> float:
        timed.append(tile)
        return 1.0

    fastest_tile(replace(SHAPE, inputs=256), CARD, seconds)
    assert len(timed) == len(set(timed)) > 3
    assert all(tile.warps * tile.splits <= 2 for tile in timed)
