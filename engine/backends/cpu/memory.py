"""What a model takes of the host's memory besides its caches, told before anything of it is loaded.

Knows sizes. Refuses to know how much memory there is, and what is done with it.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from engine.checkpoints.checkpoint import StoredWeight
from engine.checkpoints.weights import smallest_matrices
from engine.config import ModelConfig
from quant.cpu.ggml_formats import PAIR, TILE
from quant.cpu.layouts import packing_of
from quant.errors import InglenookError

FLOAT = 4  # bytes
PACKED = 1.03  # bytes for each of the file, where a sample cannot be looked at: what packing adds at most
PREPARED = 32 << 20  # bytes that compiled kernels, the recorded program and what torch samples with take; measured


@dataclass(frozen=True, slots=True)
class _Rates:
    """What a matrix of one kind takes once it is packed."""

    an_element: float  # bytes, of whole pairs of tiles
    a_byte: float  # bytes for each of the file


def packed_bytes(stored: Mapping[str, StoredWeight]) -> int:
    """About what all weights take once they are loaded: matrices in tiles, all others as float32."""
    rates = {kind: _rates(weight) for kind, weight in smallest_matrices(stored).items()}
    return sum(_packed(weight, rates) for weight in stored.values())


def _packed(weight: StoredWeight, rates: Mapping[Hashable, _Rates]) -> int:
    if weight.shape is None:
        return int(weight.nbytes * rates[weight.kind].a_byte)
    if len(weight.shape) != 2:
        return FLOAT * math.prod(weight.shape)
    rows, columns = weight.shape
    return int(-(-rows // PAIR) * PAIR * columns * rates[weight.kind].an_element)


def _rates(weight: StoredWeight) -> _Rates:
    """By a small matrix of the same layout."""
    try:
        sample = weight.sample()
        rows, columns = sample.shape
        packing = packing_of(sample)
        tile = packing.tile_bytes
        whole = -(-rows // PAIR) * 2 * tile + packing.shared_bytes
    except (InglenookError, ValueError, RuntimeError):  # of a header alone, whose values are not there
        elements = math.prod(weight.shape) if weight.shape else weight.nbytes
        return _Rates(PACKED * weight.nbytes / elements, PACKED)
    return _Rates(tile / (TILE * columns), whole / weight.nbytes)


def step_bytes(model: ModelConfig, tokens: int, rows: int) -> int:
    """About what steps of so many tokens, with so many rows of logits, compute with.

    Of each token: the stream and what is normalized of it, q, k and v, what is attended, and the MLP between its two
    products; what products read is quantized, to two bytes at most.
    """
    qkv, attended = (model.heads + 2 * model.kv_heads) * model.head_dim, model.heads * model.head_dim
    floats = 2 * model.hidden + qkv + attended
    quantized = model.hidden + attended + model.mlp_hidden
    return tokens * (FLOAT * floats + 2 * quantized) + FLOAT * rows * model.vocab_size + PREPARED
