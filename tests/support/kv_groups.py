"""KV groups without a model, and the plain layout of their blocks."""

import torch

from engine.config import BLOCK_SIZE
from engine.kv.cache import KVGroup, LayerBlock
from engine.mixer_config import CacheConfig, StateConfig


def kv_group(layers: tuple[int, ...], kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> KVGroup:
    """Return a group without a window, with the layout of the reference device."""
    shape = 2, kv_heads, BLOCK_SIZE, head_dim
    return KVGroup(layers, CacheConfig(kv_heads, head_dim), LayerBlock(shape, dtype))


def state_group(layers: tuple[int, ...], elements: int) -> KVGroup:
    """Return a group of states."""
    return KVGroup(layers, StateConfig(elements), LayerBlock((elements,), torch.float32))
