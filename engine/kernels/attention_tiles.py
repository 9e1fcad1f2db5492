"""Tiles: which queries a program of an attention kernel takes, planned on the host from the shape of a step alone.

A tile is some consecutive tokens of one request, with all query heads that share a KV head; a program attends it, or a
part of its context. Requests with few tokens have tiles of their own, which are small and read memory as fast as it
goes; long ones have large tiles, which read it seldom.
Knows lengths. Refuses to know what tensors hold, so that planning never waits for a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from engine.kernels.attention_tuning import DECODE_ROWS, prompt_rows
from quant.kernels.card import Card


@dataclass(frozen=True, slots=True)
class TileQueries:
    """Tokens of one tile, at most. Where results must not depend on the tile the two are one number."""

    few: int  # of a request with no more tokens than this
    many: int  # of any other


@dataclass(frozen=True, slots=True)
class TileList:
    """Tiles of equal size: one launch."""

    # int32 [n, 3]: the request, which of its tokens of this step is the first of the tile, and which that is among all
    # tokens of the list
    tiles: Tensor
    tokens: int  # of all tiles
    queries: int  # tokens of a tile, at most
    max_context: int  # no request of these has a longer context


@dataclass(frozen=True, slots=True)
class Tiles:
    """All tiles of a step. A token is in exactly one."""

    lists: tuple[TileList, ...]

    def to(self, device: torch.device) -> Self:
        return replace(self, lists=tuple(replace(it, tiles=it.tiles.to(device)) for it in self.lists))


def tile_queries(heads: int, kv_heads: int, head_dim: int, card: Card, *, deterministic: bool) -> TileQueries:
    """The tile sizes of a layer's shape. `deterministic`: a token's bits do not depend on what else the step has."""
    group = heads // kv_heads
    many = max(1, prompt_rows(head_dim, card, deterministic=deterministic) // group)
    return TileQueries(many if deterministic else max(1, DECODE_ROWS // group), many)


def query_tiles(query_starts: Sequence[int], context_lengths: Sequence[int], queries: TileQueries) -> Tiles:
    """The tiles of any step, in the host's memory.

    Request r has tokens query_starts[r] .. query_starts[r + 1], the last ones of its context.
    """
    few, many = _Rows(queries.few), _Rows(queries.many)
    for request, context in enumerate(context_lengths):
        count = query_starts[request + 1] - query_starts[request]
        (few if count <= queries.few else many).add(request, count, context)
    return Tiles(tuple(rows.tile_list() for rows in (few, many) if rows.tokens))


def decode_tiles(requests: int, max_context: int, queries: TileQueries) -> Tiles:
    """The tiles of a step in which every request has one token: they depend on the number of requests alone.

    For a recorded step: `max_context` is the longest context it may be replayed for. Requests that stand for nothing
    have one token and a context of 0; their output is 0.
    """
    numbers = torch.arange(requests, dtype=torch.int32)
    tiles = torch.stack((numbers, torch.zeros_like(numbers), numbers), -1)
    return Tiles((TileList(tiles, requests, queries.few, max_context),))


@dataclass(slots=True)
class _Rows:
    """A list of tiles as it grows."""

    queries: int
    tokens: int = 0
    tiles: list[tuple[int, int, int, int]] = field(default_factory=list)  # as in a TileList, and where the tile ends

    def add(self, request: int, count: int, context: int) -> None:
        """The last `count` tokens of a request's context."""
        for first in range(0, count, self.queries):
            end = context - count + min(count, first + self.queries)
            self.tiles.append((request, first, self.tokens + first, end))
        self.tokens += count

    def tile_list(self) -> TileList:
        """Those that see most come first, so that none is left alone at the end."""
        ordered = sorted(self.tiles, key=lambda tile: -tile[3])
        numbers = torch.tensor([tile[:3] for tile in ordered], dtype=torch.int32)
        return TileList(numbers, self.tokens, self.queries, ordered[0][3])
