"""KVCache: the paged pools that store the keys and values of every request, and its states.

Layers with equal cache configurations form a group. Each group has one pool, with its own shape and type of blocks.
Pools are block-major: the content of a block, for all layers of its group, is contiguous, so that moving a block is one
copy. `engine.kv.blocks` tracks which blocks are in use.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kv.blocks import NULL_BLOCK
from engine.kv.transfers import MoveBlock
from engine.mixer_config import CacheConfig, StateConfig
from engine.model_config import ModelConfig
from engine.step import BlockCopy


@dataclass(frozen=True, slots=True)
class LayerBlock:
    """The shape and the type of one layer's part of a block."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# function of a device that returns the layer block for a cache configuration
LayoutOf = Callable[[CacheConfig], LayerBlock]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with the same cache configuration. `layers` are the model's layer numbers, in pool order."""

    layers: tuple[int, ...]
    cache: CacheConfig | StateConfig
    layer_block: LayerBlock

    @property
    def block_shape(self) -> tuple[int, ...]:
        return len(self.layers), *self.layer_block.shape

    @property
    def block_bytes(self) -> int:
        return len(self.layers) * self.layer_block.num_bytes


def kv_groups(model: ModelConfig, layout: LayoutOf) -> tuple[KVGroup, ...]:
    """Return the KV groups of a model, one for each of `ModelConfig.caches`. All devices store states as float32."""

    def block(cache: CacheConfig | StateConfig) -> LayerBlock:
        return layout(cache) if isinstance(cache, CacheConfig) else LayerBlock((cache.elements,), torch.float32)

    return tuple(KVGroup(model.layers_of(cache), cache, block(cache)) for cache in model.caches)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's share of its group's pool: a view [blocks, ...] in the device's own layout."""

    group: int  # index into the batch's block tables and slot mappings
    pool: Tensor
    kv_heads: int
    head_dim: int

    def query_heads(self, width: int, *, queries_only: bool) -> int:
        """Return the number of query heads in rows of `width` columns, which hold q, or q, k, and v."""
        return width // self.head_dim - (0 if queries_only else 2 * self.kv_heads)


@dataclass(frozen=True, slots=True)
class LayerState:
    """One recurrent layer's share of its group's pool. A batch's block tables name the states (see `Batch`)."""

    group: int  # index into the batch's block tables
    pool: Tensor  # float32 [blocks, elements]


Reserve = Callable[[tuple[int, ...], torch.dtype], Tensor]


def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate host memory, in huge pages if the system has them. numpy requests huge pages; torch does not.

    The memory is not initialized: the operating system provides each page when it is first written.
    """
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(shape)


class KVCache:
    """One pool per group, [blocks, layers, ...]. With `host_blocks`, each group also has a pool in the host's memory.

    The null block of a group of states is the state before the first token: zeros.

    `num_blocks` and `host_blocks` have one number per group. Devices that do not compute in the host's memory use a
    subclass, and pass `reserve_pool` and `reserve_host`. `pools`: pools of these sizes to use, with their content.
    """

    computes_on_host = True  # whether the pools are in the host's memory, so that they can outlive the model

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        host_blocks: Sequence[int] = (),
        reserve_pool: Reserve | None = None,
        reserve_host: Reserve | None = None,
        pools: Sequence[Tensor] = (),
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = max(num_blocks)
        self.pools = tuple(pools) or _pools(groups, num_blocks, reserve_pool or reserve)
        self.host_pools = _pools(groups, host_blocks, reserve_host or reserve) if host_blocks else ()
        self._layers: dict[int, LayerKV] = {}
        self._states: dict[int, LayerState] = {}
        for index, (group, pool) in enumerate(zip(groups, self.pools, strict=True)):
            for position, layer in enumerate(group.layers):
                own = pool[:, position]
                if isinstance(group.cache, StateConfig):
                    self._states[layer] = LayerState(index, own)
                    own[NULL_BLOCK] = 0
                else:
                    self._layers[layer] = LayerKV(index, own, group.cache.kv_heads, group.cache.head_dim)

    def layer(self, layer: int) -> LayerKV:
        return self._layers[layer]

    def state(self, layer: int) -> LayerState:
        return self._states[layer]

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks within their pools, in the given order."""
        for copy in copies:
            pool = self.pools[copy.group]
            pool[copy.target].copy_(pool[copy.source])

    def move(self, moves: Iterable[MoveBlock]) -> None:
        """Copy blocks between the device pools and the host pools."""
        for move in moves:
            here, there = self.pools[move.group], self.host_pools[move.group]
            source, target = (here, there) if move.to_host else (there, here)
            target[move.target].copy_(source[move.source])

    def unpin(self) -> None:
        """Let the system handle the memory of host pools as any other again. No block is moved afterwards."""

    @property
    def block_bytes(self) -> list[int]:
        """The size of one block in bytes, for each group."""
        return [group.block_bytes for group in self.groups]

    def contents(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        """Return views of the content of blocks. Read them before the blocks are written again."""
        pool = bytes_of(self.pools[group])
        return [pool[block].numpy().data for block in blocks]

    def fill(self, group: int, block: int, content: memoryview) -> None:
        """Overwrite the content of a block."""
        bytes_of(self.pools[group])[block].numpy().data[:] = content


def _pools(groups: Sequence[KVGroup], sizes: Sequence[int], reserve: Reserve) -> tuple[Tensor, ...]:
    return tuple(
        reserve((size, *group.block_shape), group.layer_block.dtype) for group, size in zip(groups, sizes, strict=True)
    )


def bytes_of(pool: Tensor) -> Tensor:
    """Return a view of a pool as uint8 [blocks, bytes per block]."""
    return pool.view(torch.uint8).view(len(pool), -1)
