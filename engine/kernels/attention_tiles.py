"""Tiles: the queries that one program of an attention kernel handles, planned on the host from the shape of a step.

A tile is a range of consecutive tokens of one request, with all query heads that share a KV head. A program attends
over all or part of a tile's context. Requests with few tokens in the step get small tiles, which are bound by memory
bandwidth; requests with many tokens get large tiles, which read keys and values less often. The plan depends on lengths
only, so it never waits for the device.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from engine.kernels.attention_tuning import DECODE_ROWS, prompt_rows
from engine.mixer_config import AttentionConfig
from quant.kernels.card import Card


@dataclass(frozen=True, slots=True)
class TileQueries:
    """Maximum number of tokens per tile. Both are equal if results must not depend on the tile size."""

    few: int  # limit for requests with at most this many tokens in the step
    many: int  # limit for all other requests


@dataclass(frozen=True, slots=True)
class TileList:
    """Tiles of equal size, which one kernel launch processes."""

    # int32 [n, 3]: the request, the index of the tile's first token among the request's tokens in this step, and the
    # index of that token among the tokens of this list
    tiles: Tensor
    tokens: int  # total number of tokens in all tiles
    queries: int  # maximum number of tokens per tile
    max_context: int  # longest context of a request in the list, in tokens


@dataclass(frozen=True, slots=True)
class Tiles:
    """All tiles of a step. Each token is in exactly one tile."""

    lists: tuple[TileList, ...]

    def to(self, device: torch.device) -> Self:
        return replace(self, lists=tuple(replace(it, tiles=it.tiles.to(device)) for it in self.lists))


def tile_queries(mixers: Collection[AttentionConfig], card: Card, *, deterministic: bool) -> TileQueries:
    """Return the tile sizes for the layers of a model: the largest that all of their kernels support.

    `deterministic`: a token's bits must not depend on the other requests in the step.
    """
    group = max(it.heads // it.kv_heads for it in mixers)
    many = max(1, min(prompt_rows(it.head_dim, card, deterministic=deterministic) for it in mixers) // group)
    return TileQueries(many if deterministic else max(1, DECODE_ROWS // group), many)


def query_tiles(query_starts: Sequence[int], context_lengths: Sequence[int], queries: TileQueries) -> Tiles:
    """Return the tiles of any step, in host memory.

    Request r has the tokens query_starts[r] .. query_starts[r + 1], which are the last ones of its context.
    """
    few, many = _Rows(queries.few), _Rows(queries.many)
    for request, context in enumerate(context_lengths):
        count = query_starts[request + 1] - query_starts[request]
        (few if count <= queries.few else many).add(request, count, context)
    return Tiles(tuple(rows.tile_list() for rows in (few, many) if rows.tokens))


def decode_tiles(requests: int, max_context: int, queries: TileQueries) -> Tiles:
    """Return the tiles of a step in which every request has one token. They depend only on the number of requests.

    They are meant for a captured step: `max_context` is the longest context that it may be replayed for. Padding
    requests have one token and a context of 0; their output is 0.
    """
    numbers = torch.arange(requests, dtype=torch.int32)
    tiles = torch.stack((numbers, torch.zeros_like(numbers), numbers), -1)
    return Tiles((TileList(tiles, requests, queries.few, max_context),))


def padded_tiles(
    query_starts: Sequence[int], requests: int, per_request: int, max_context: int, queries: TileQueries
) -> Tiles:
    """Return the tiles of a step in which at most `requests` requests have at most `per_request` tokens each.

    Their number does not depend on the step: tiles without tokens are added. `query_starts` includes padding requests,
    of which only the last has several tokens. `max_context` is as in `decode_tiles`.
    """
    size = queries.few if per_request <= queries.few else queries.many
    spans = list(pairwise(query_starts))
    tiles = [
        (request, first, start + first)
        for request, (start, stop) in enumerate(spans)
        for first in range(0, stop - start, size)
    ]
    start, stop = spans[-1]
    count = requests * -(-per_request // size) + -(-stop // size)
    tiles += [(len(spans) - 1, stop - start, 0)] * (count - len(tiles))
    return Tiles((TileList(torch.tensor(tiles, dtype=torch.int32), stop, size, max_context),))


@dataclass(slots=True)
class _Rows:
    """A list of tiles under construction."""

    queries: int
    tokens: int = 0
    # the three columns of TileList.tiles, then the end position of the tile in the context
    tiles: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, request: int, count: int, context: int) -> None:
        """Add tiles for the last `count` tokens of a request's context."""
        for first in range(0, count, self.queries):
            end = context - count + min(count, first + self.queries)
            self.tiles.append((request, first, self.tokens + first, end))
        self.tokens += count

    def tile_list(self) -> TileList:
        """Return the finished list, sorted by descending context, so that no long tile starts last."""
        ordered = sorted(self.tiles, key=lambda tile: -tile[3])
        numbers = torch.tensor([tile[:3] for tile in ordered], dtype=torch.int32)
        return TileList(numbers, self.tokens, self.queries, ordered[0][3])
