"""KVCache: the paged pools that hold the keys and values of every request.

Layers of equal KV shape form a group, and a group has one pool, block-major: everything a block holds, for every layer
of its group, is one contiguous piece of memory, so that moving a block is one copy.

Knows shapes and memory. Refuses to know which block belongs to whom (`engine.kv.blocks` does).
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
    """One layer's part of its group's pool: a view [blocks, ...], the rest as the device lays a layer out."""

    group: int  # index into the batch's block tables and slot mappings
    pool: Tensor
    kv_heads: int
    head_dim: int


LayerShape = Callable[[int, int], tuple[int, ...]]  # of one layer of one block, from KV heads and head dimension
Reserve = Callable[[tuple[int, ...], torch.dtype], Tensor]


def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of the host: in huge pages where the system has them, which numpy asks for and torch does not. Reserved,
    not filled: the operating system hands a page over when it is first written."""
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(shape)


class KVCache:
    """One pool for each group, [blocks, layers, ...], and one of `host_blocks` in the host's memory where there is one.

    `num_blocks` is that of each group, or of all.
    This is the cache of a device that computes in the host's memory; those of others have it elsewhere.
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
        """Copy blocks within their pools, one after another."""
        for copy in copies:
            pool = self.pools[copy.group]
            pool[copy.target].copy_(pool[copy.source])

    def move(self, moves: Iterable[MoveBlock]) -> None:
        """Copy blocks between the pools."""
        for move in moves:
            here, there = self.pools[move.group], self.host_pools[move.group]
            source, target = (here, there) if move.to_host else (there, here)
            target[move.target].copy_(source[move.source])

    @property
    def block_bytes(self) -> list[int]:
        """That a block of each group takes."""
        return [math.prod(pool.shape[1:]) * pool.itemsize for pool in self.pools]

    def contents(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        """Everything that each of some blocks holds; to be read before they are written again."""
        pool = bytes_of(self.pools[group])
        return [pool[block].numpy().data for block in blocks]

    def fill(self, group: int, block: int, content: memoryview) -> None:
        """Write everything that a block holds."""
        bytes_of(self.pools[group])[block].numpy().data[:] = content


def bytes_of(pool: Tensor) -> Tensor:
    """A pool as uint8 [blocks, bytes of one]."""
    return pool.view(torch.uint8).view(len(pool), -1)
