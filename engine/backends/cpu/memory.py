"""Estimate the host memory that a model needs in addition to its KV cache, before anything is loaded."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from engine.checkpoints.checkpoint import StoredWeight, host_weight_bytes, stored_bytes
from engine.checkpoints.weights import smallest_matrices
from engine.model_config import ModelConfig
from quant.cpu.ggml_formats import PAIR, TILE
from quant.cpu.layouts import packing_of
from quant.errors import InglenookError

FLOAT = 4  # bytes of a float32
PACKED_RATIO = 1.03  # upper bound of packed bytes per byte of the file, used if no sample can be packed
DECODED_RATIO = 1.4  # upper bound of the bytes of a decoded matrix per byte of the file, as measured
# Bytes for the recorded program and torch's sampling, the most that was measured. Compiled kernels belong to the
# process: all models share them, and no unload frees them.
PROGRAM_BYTES = 24 << 20


@dataclass(frozen=True, slots=True)
class _Rates:
    """Measured size of packed matrices of one kind."""

    bytes_per_element: float  # packed bytes per element in whole pairs of tiles
    bytes_per_stored_byte: float  # packed bytes per byte in the file


def packed_bytes(stored: Mapping[str, StoredWeight]) -> int:
    """Return the approximate size of all loaded weights: matrices packed into tiles, others as float32."""
    rates = {kind: _rates(weight) for kind, weight in smallest_matrices(stored).items()}
    return sum(_packed(weight, rates) for weight in stored.values())


def _packed(weight: StoredWeight, rates: Mapping[Hashable, _Rates]) -> int:
    if weight.shape is None:
        return int(weight.nbytes * rates[weight.kind].bytes_per_stored_byte)
    if len(weight.shape) != 2:
        return FLOAT * math.prod(weight.shape)
    rows, columns = weight.shape
    return int(-(-rows // PAIR) * PAIR * columns * rates[weight.kind].bytes_per_element)


def _rates(weight: StoredWeight) -> _Rates:
    """Return the rates of a kind of weight, measured by packing a small matrix of it."""
    try:
        sample = weight.sample()
        rows, columns = sample.shape
        packing = packing_of(sample)
        tile = packing.tile_bytes
        whole = -(-rows // PAIR) * 2 * tile + packing.shared_bytes
    # only the header of the checkpoint is available, so there are no values to pack
    except (InglenookError, ValueError, RuntimeError):
        elements = math.prod(weight.shape) if weight.shape else weight.nbytes
        return _Rates(PACKED_RATIO * weight.nbytes / elements, PACKED_RATIO)
    return _Rates(tile / (TILE * columns), whole / weight.nbytes)


def loading_bytes(stored: Mapping[str, StoredWeight], threads: int) -> int:
    """Return the approximate memory that loading needs besides the loaded weights, and frees again.

    Each thread holds decoded matrices of a layer, at most two at once, while it packs them. The tables are packed
    before the layers, but the embeddings that each layer has after them.
    """
    layers = [weight.nbytes for name, weight in stored.items() if name.startswith("blk.")]
    last = host_weight_bytes(stored)
    first = stored_bytes(stored) - sum(layers) - last
    decoded = DECODED_RATIO * max(2 * threads * max(layers, default=0), last)
    return PROGRAM_BYTES + int(max(decoded, DECODED_RATIO * first - sum(layers) - last))


def step_bytes(model: ModelConfig, tokens: int, rows: int) -> int:
    """Return the approximate working memory of steps with at most `tokens` tokens and `rows` rows of logits.

    Per token: the residual stream and its normalized copy, the input and output of the mixer, and the MLP activations;
    with experts, also the input and the output of each chosen one. Inputs of products are quantized, to at most two
    bytes per element.
    """
    before, after = max(it.in_width for it in model.mixers), max(it.width for it in model.mixers)
    floats = (2 + model.active_experts) * model.hidden + before + after + 2 * model.per_layer * len(model.layers)
    quantized = (1 + model.active_experts) * model.hidden + after + model.step_columns
    return tokens * (FLOAT * floats + 2 * quantized) + FLOAT * rows * model.vocab_size + PROGRAM_BYTES
