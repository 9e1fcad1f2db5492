"""KVCache: the paged pools that store the keys and values of every request.

Layers with the same KV shape form a group, and each group has one pool. Pools are block-major: the content of a block,
for all layers of its group, is contiguous, so that moving a block is one copy. `engine.kv.blocks` tracks which blocks
are in use.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kv.transfers import MoveBlock
from engine.step import BlockCopy


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose keys and values have the same shape. `layers` are the model's layer numbers, in pool order."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's share of its group's pool: a view [blocks, ...] in the device's own layout."""

    group: int  # index into the batch's block tables and slot mappings
    pool: Tensor
    kv_heads: int
    head_dim: int


# function that returns the shape of one layer of one block, given the number of KV heads and the head dimension
LayerShape = Callable[[int, int], tuple[int, ...]]
Reserve = Callable[[tuple[int, ...], torch.dtype], Tensor]


def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate host memory, in huge pages if the system has them. numpy requests huge pages; torch does not.

    The memory is not initialized: the operating system provides each page when it is first written.
    """
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(shape)


class KVCache:
    """One pool per group, [blocks, layers, ...]. With `host_blocks`, each group also has a pool in the host's memory.

    `num_blocks` is one number for all groups, or a sequence with one per group. Devices that do not compute in the
    host's memory use a subclass, and pass `reserve_pool` and `reserve_host`.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: int | Sequence[int],
        layer_shape: LayerShape,
        dtype: torch.dtype,
        host_blocks: int = 0,
        reserve_pool: Reserve | None = None,
        reserve_host: Reserve | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks if isinstance(num_blocks, int) else max(num_blocks)
        sizes = [num_blocks] * len(self.groups) if isinstance(num_blocks, int) else num_blocks
        shapes = [(len(group.layers), *layer_shape(group.kv_heads, group.head_dim)) for group in groups]
        reserve_pool, reserve_host = reserve_pool or reserve, reserve_host or reserve
        self.pools = tuple(reserve_pool((size, *shape), dtype) for size, shape in zip(sizes, shapes, strict=True))
        self.host_pools = tuple(reserve_host((host_blocks, *shape), dtype) for shape in shapes if host_blocks)
        self._layers = {
            layer: LayerKV(index, self.pools[index][:, position], group.kv_heads, group.head_dim)
            for index, group in enumerate(groups)
            for position, layer in enumerate(group.layers)
        }

    def layer(self, layer: int) -> LayerKV:
        return self._layers[layer]

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

    @property
    def block_bytes(self) -> list[int]:
        """The size of one block in bytes, for each group."""
        return [math.prod(pool.shape[1:]) * pool.itemsize for pool in self.pools]

    def contents(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        """Return views of the content of blocks. Read them before the blocks are written again."""
        pool = bytes_of(self.pools[group])
        return [pool[block].numpy().data for block in blocks]

    def fill(self, group: int, block: int, content: memoryview) -> None:
        """Overwrite the content of a block."""
        bytes_of(self.pools[group])[block].numpy().data[:] = content


def bytes_of(pool: Tensor) -> Tensor:
    """Return a view of a pool as uint8 [blocks, bytes per block]."""
    return pool.view(torch.uint8).view(len(pool), -1)
