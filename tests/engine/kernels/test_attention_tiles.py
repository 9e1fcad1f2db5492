"""Tests of the division of a step's queries into tiles."""

import random
from dataclasses import replace

import pytest

from engine.kernels.attention_tiles import TileQueries, decode_tiles, padded_tiles, query_tiles, tile_queries
from engine.kernels.attention_tuning import prompt_rows, tuning
from engine.mixer_config import AttentionConfig, CacheConfig
from quant.kernels.card import Card

H100 = Card("H100", (9, 0), 132, 232448, 50 << 20, 80 << 30)


@pytest.mark.parametrize("queries", [TileQueries(4, 16), TileQueries(8, 8), TileQueries(1, 1)])
def test_each_token_is_in_exactly_one_tile(queries: TileQueries) -> None:
    counts = [1, 100] + [random.choice([0, 1, 3, 4, 5, 16, 17, 100]) for _ in range(18)]
    starts = [sum(counts[:number]) for number in range(len(counts) + 1)]
    contexts = [count + random.randrange(50) for count in counts]
    tiles = query_tiles(starts, contexts, queries)
    covered = [
        (request, token)
        for it in tiles.lists
        for request, first, _ in it.tiles.tolist()
        for token in range(first, min(counts[request], first + it.queries))
    ]
    assert sorted(covered) == [(request, token) for request, count in enumerate(counts) for token in range(count)]
    for it in tiles.lists:
        requests = it.tiles[:, 0].tolist()
        offsets = [
            offset + token
            for request, first, offset in it.tiles.tolist()
            for token in range(min(it.queries, counts[request] - first))
        ]
        assert sorted(offsets) == list(range(it.tokens))
        assert it.max_context == max(contexts[request] for request in requests)
        assert all((counts[request] <= queries.few) == (it is tiles.lists[0]) for request in requests)


def test_tiles_are_sorted_by_descending_context() -> None:
    (tiles,) = query_tiles([0, 10, 20], [10, 200], TileQueries(4, 4)).lists
    assert tiles.tiles[:, :2].tolist() == [[1, 8], [1, 4], [1, 0], [0, 8], [0, 4], [0, 0]]
    assert tiles.max_context == 200


def test_decode_tiles_do_not_depend_on_context_lengths() -> None:
    (fixed,) = decode_tiles(3, 512, TileQueries(4, 16)).lists
    (planned,) = query_tiles([0, 1, 2, 3], [512, 30, 20], TileQueries(4, 16)).lists
    assert fixed.tiles.equal(planned.tiles)
    assert replace(fixed, tiles=planned.tiles) == planned


@pytest.mark.parametrize("queries", [TileQueries(4, 16), TileQueries(2, 2), TileQueries(1, 3)])
@pytest.mark.parametrize("starts", [[0, 8, 16, 16], [0, 5, 6, 16], [0, 1, 2, 16], [0, 3, 4, 16]])
def test_number_of_padded_tiles_depends_on_the_size_only(starts: list[int], queries: TileQueries) -> None:
    """A step of at most two requests with at most 8 tokens each. The last request is padding."""
    (tiles,) = padded_tiles(starts, 2, 8, 64, queries).lists
    (full,) = padded_tiles([0, 8, 16, 16], 2, 8, 64, queries).lists
    assert replace(tiles, tiles=full.tiles) == full
    assert tiles.tiles.shape == full.tiles.shape
    covered = [
        (offset + token, starts[request] + first + token)
        for request, first, offset in tiles.tiles.tolist()
        for token in range(min(tiles.queries, starts[request + 1] - starts[request] - first))
    ]
    assert sorted(covered) == [(token, token) for token in range(16)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (4, 4), (71, 1), (9, 3)])
def test_deterministic_tiles_have_one_size(heads: int, kv_heads: int) -> None:
    mixers = [AttentionConfig(heads, CacheConfig(kv_heads, 64))]
    same, free = (tile_queries(mixers, H100, deterministic=it) for it in (True, False))
    assert same.few == same.many >= 1
    assert free.many >= free.few >= 1


def card(capability: tuple[int, int], shared_memory: int) -> Card:
    return replace(H100, capability=capability, shared_memory=shared_memory << 10)


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("newer", "known"),
    [
        (card((10, 3), 227), card((10, 0), 227)),
        (card((11, 0), 227), card((8, 0), 163)),
        (card((12, 1), 99), card((12, 0), 99)),
        (card((8, 7), 163), card((8, 0), 163)),
    ],
    ids=lambda it: f"sm_{it.architecture}",
)
def test_newer_architectures_have_the_tiles_of_the_known_one(
    newer: Card, known: Card, columns: int, deterministic: bool
) -> None:
    rows = [prompt_rows(columns, it, deterministic=deterministic) for it in (newer, known)]
    assert rows[0] == rows[1]
    for count in (1, rows[0]):
        same = [tuning(count, columns, it, deterministic=deterministic) for it in (newer, known)]
        assert same[0] == same[1]


def test_tiles_suit_all_layers_of_a_model() -> None:
    """Many query heads per KV head, and wide heads, each limit the tokens of a tile."""
    wide, many = AttentionConfig(4, CacheConfig(4, 256)), AttentionConfig(16, CacheConfig(1, 64))
    alone = [tile_queries([it], H100, deterministic=False) for it in (wide, many)]
    both = tile_queries([wide, many], H100, deterministic=False)
    assert both.few == min(it.few for it in alone)
    assert both.many <= min(it.many for it in alone)
