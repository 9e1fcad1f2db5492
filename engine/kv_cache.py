"""KVCache: the paged pools that hold the keys and values of every request.

Layers of equal KV shape form a group, and a group has one pool, block-major: everything a block holds, for every layer
of its group, is one contiguous piece of memory, so that moving a block is one copy.

Knows shapes and memory. Refuses to know which block belongs to whom (`engine.blocks` does).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose keys and values have the same shape. `layers` are the model's layer numbers, in pool order."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's part of its group's pool: a view [blocks, 2 (k, v), kv_heads, BLOCK_SIZE, head_dim]."""

    group: int  # index into the batch's block tables and slot mappings
    pool: Tensor


class KVCache:
    """One pool for each group, [blocks, layers, 2 (k, v), kv_heads, BLOCK_SIZE, head_dim].

    Memory is reserved, not filled: the operating system hands a page over when it is first written.
    """

    def __init__(self, groups: Sequence[KVGroup], num_blocks: int, dtype: torch.dtype) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.pools = tuple(torch.empty((num_blocks, *_block_shape(group)), dtype=dtype) for group in groups)
        self._layers = {
            layer: LayerKV(index, self.pools[index][:, position])
            for index, group in enumerate(groups)
            for position, layer in enumerate(group.layers)
        }

    def layer(self, layer: int) -> LayerKV:
        return self._layers[layer]


def _block_shape(group: KVGroup) -> tuple[int, ...]:
    return (len(group.layers), 2, group.kv_heads, BLOCK_SIZE, group.head_dim)
