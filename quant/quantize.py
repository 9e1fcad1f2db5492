"""Quantize weights of 16 or 32 bits to 8-bit floats, 4-bit integers, or NF4: from one canonical form to another.

    fp8     e4m3, with a scale for each row: its largest magnitude becomes 448
    int4    codes from 0 to 15, with the scale and integer zero point of the least squared error for each group of
            columns (`quant.scale_search`)
    nf4     16 values that are equally likely in normally distributed weights, times the largest magnitude of 64
            columns; QLoRA, https://arxiv.org/abs/2305.14314, rounded as bitsandbytes does. With `nested`, those
            magnitudes minus their mean are also quantized, 256 at a time.

Scales are rounded first, and codes are chosen for the rounded scales. Rows are quantized in slabs, so that intermediate
results take at most one byte for each weight.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quant.bitsandbytes import NF4
from quant.errors import ModelFileError, UnsupportedQuantization
from quant.ggml_blocks import SLAB
from quant.packed_integers import pack
from quant.scale_search import Floats, GroupScales, codes, search
from quant.tensor import Float8Tensor, GroupedTensor, GroupScale, NestedScale, PlainTensor

Quantizer = Callable[[PlainTensor], Float8Tensor | GroupedTensor]

SCALE_TYPE = torch.bfloat16  # type of scales for fp8 and int4: two bytes, with the range of float32
LEAST_IMPORTANCE = 1e-6  # least importance of a column, relative to the largest in its group
LARGEST = 1e15  # largest magnitude of a weight: squares and their sums must not overflow
LARGEST_E4M3 = 448.0
TOP = 15  # largest 4-bit code
GROUPS = (128, 64, 32)  # possible numbers of columns in a group, the preferred one first
NF4_BLOCK = 64  # number of columns in a block
NESTED_BLOCK = 256  # number of nested scales in a block

# Names of modules that are not quantized: embeddings, heads, expert routers, and norms that have a row of weights for
# each head. The names are those of Hugging Face and of GGUF.
KEPT = frozenset(
    (
        *("embed_tokens", "word_embeddings", "position_embeddings", "token_type_embeddings", "lm_head"),
        *("embed_tokens_per_layer", "per_layer_token_embd"),
        *("router", "router.proj", "gate", "shared_expert_gate", "token_embd", "output", "ffn_gate_inp"),
        *("q_norm", "k_norm", "attn_q_norm", "attn_k_norm"),
    )
)


def is_linear_weight(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear layer and its module is not in KEPT."""
    *modules, kind = name.split(".")
    names = {".".join(modules[-parts:]) for parts in (1, 2)}
    return kind == "weight" and len(shape) == 2 and bool(modules) and KEPT.isdisjoint(names)


def group_size(columns: Iterable[int]) -> int:
    """Return the largest int4 group size that divides all these column counts. Raises UnsupportedQuantization."""
    common = math.gcd(*columns)
    for group in GROUPS:
        if common % group == 0:
            return group
    raise UnsupportedQuantization(
        f"No group size of {', '.join(map(str, GROUPS))} columns divides every matrix of the model",
        "Quantize it to fp8, which has no groups.",
    )


def check_divisible(columns: Iterable[int], group: int) -> None:
    """Raise UnsupportedQuantization if `group` does not divide one of these column counts."""
    for count in columns:
        if count % group:
            raise UnsupportedQuantization(
                f"Groups of {group} do not divide a matrix of {count} columns",
                "Choose smaller groups, or fp8, which has no groups.",
            )


def fp8(weight: PlainTensor) -> Float8Tensor:
    """Quantize a matrix to fp8. Raises ModelFileError if it is not a matrix of finite values up to LARGEST."""
    rows, columns = _shape(weight)
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, 1, dtype=SCALE_TYPE)
    for some, numbers in _slabs(weight):
        largest = torch.from_numpy(np.abs(numbers).max(-1, keepdims=True))
        scale[some] = (largest / LARGEST_E4M3).clamp(min=torch.finfo(SCALE_TYPE).tiny).to(SCALE_TYPE)
        scaled = torch.from_numpy(numbers) / scale[some].float()
        values[some] = scaled.clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(values.dtype)
    return Float8Tensor((rows, columns), "F8_E4M3", values, scale, (1, columns))


def int4(weight: PlainTensor, group: int | None = None, importance: Tensor | None = None) -> GroupedTensor:
    """Quantize a matrix to int4, in groups of `group` columns, by default the largest size that divides the columns.

    `importance`, float32 [columns], finite and not negative, is the weight of a squared error in each column. With the
    mean square of the layer's inputs, the error of the layer's outputs is minimized. None: all columns are equal.

    Raises ModelFileError if it is not a matrix of finite values up to LARGEST, UnsupportedQuantization if groups do not
    divide it.
    """
    rows, columns = _shape(weight)
    group = group or group_size([columns])
    check_divisible([columns], group)
    groups = columns // group
    counts = None if importance is None else _relative(importance.view(groups, group))
    found = np.empty((rows, columns), np.uint8)
    scale = torch.empty(rows, groups, dtype=SCALE_TYPE)
    zeros = np.empty((rows, groups), np.uint8)
    for some, numbers in _slabs(weight):
        by_group = numbers.reshape(-1, group)
        best = search(by_group, TOP, None if counts is None else np.tile(counts, (len(numbers), 1)))
        stored = torch.from_numpy(best.scale).to(SCALE_TYPE)
        kept = GroupScales(stored.float().numpy(), best.zero)
        found[some] = codes(by_group, kept, TOP).reshape(-1, columns)
        scale[some], zeros[some] = stored.view(-1, groups), best.zero.reshape(-1, groups)
    return GroupedTensor(
        shape=(rows, columns),
        type_name="CT-INT4",
        group=group,
        codes=pack((rows, columns), 4, lambda some: found[some]),
        scale=GroupScale(scale),
        zero=pack((rows, groups), 4, lambda some: zeros[some]),
    )


def _relative(importance: Tensor) -> Floats:
    """Return the importance divided by the largest one of each group, [groups, group]. If all are zero, return 1."""
    largest = importance.amax(-1, keepdim=True)
    relative: Floats = torch.where(largest > 0, importance / largest, 1).clamp(min=LEAST_IMPORTANCE).numpy()
    return relative


def nf4(weight: PlainTensor, *, nested: bool = False) -> GroupedTensor:
    """Quantize a matrix to NF4. Raises the same errors as `int4`."""
    rows, columns = _shape(weight)
    check_divisible([columns], NF4_BLOCK)
    found = np.empty((rows, columns), np.uint8)
    largest = np.empty((rows, columns // NF4_BLOCK), np.float32)
    for some, numbers in _slabs(weight):
        blocks, scale = _nearest(numbers.reshape(-1, NF4_BLOCK), np.array(NF4, np.float32))
        found[some], largest[some] = blocks.reshape(-1, columns), scale.reshape(-1, columns // NF4_BLOCK)
    scales = torch.from_numpy(largest)
    return GroupedTensor(
        shape=(rows, columns),
        type_name="NF4",
        group=NF4_BLOCK,
        codes=pack((rows, columns), 4, lambda some: found[some]),
        scale=_nested(scales) if nested else GroupScale(scales),
        table=NF4,
    )


def _nested(scales: Tensor) -> NestedScale:
    offset = scales.mean()
    numbers = (scales - offset).numpy().reshape(-1)
    padded = np.pad(numbers, (0, -len(numbers) % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    found, block_scales = _nearest(padded, dynamic_table())
    stored = torch.from_numpy(found.reshape(-1)[: len(numbers)].reshape(scales.shape).copy())
    table = torch.from_numpy(dynamic_table().copy())
    return NestedScale(stored, table, torch.from_numpy(block_scales.reshape(-1)), NESTED_BLOCK, float(offset))


@cache
def dynamic_table() -> Floats:
    """Return the values of bitsandbytes' codes for scales, float32 [256], ascending.

    They are zero, one, and, with both signs, the midpoints of 2 ** i equal parts of the range from 0.1 to 1, times 10
    ** (i - 6), for i from 0 to 6. Dettmers, https://arxiv.org/abs/1511.04561.
    """
    numbers = [torch.tensor([0.0, 1.0])]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)
        numbers += [means, -means]
    return torch.cat(numbers).sort().values.numpy()


def _nearest(blocks: Floats, table: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Return the codes of the nearest values in an ascending table, and each block's largest magnitude [blocks, 1].

    Halfway between two values, the lower one is chosen.
    """
    largest = np.abs(blocks).max(-1, keepdims=True)
    scaled = np.clip(blocks * (1 / np.maximum(largest, np.float32(1e-38))), -1, 1)
    middles = (table[:-1] + table[1:]) / 2
    if len(table) > TOP + 1:
        return np.searchsorted(middles, scaled).astype(np.uint8), largest
    found = np.zeros(blocks.shape, np.uint8)
    for middle in middles:  # for small tables, this is faster than np.searchsorted
        found += scaled > middle
    return found, largest


def _slabs(weight: PlainTensor) -> Iterator[tuple[slice, Floats]]:
    """Yield slabs of rows as float32. Raises ModelFileError for values that are not finite or exceed LARGEST."""
    rows, columns = weight.values.shape
    step = max(1, SLAB // columns)
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        numbers: Floats = weight.values[some].float().numpy()
        if not (np.abs(numbers) <= LARGEST).all():
            raise ModelFileError(
                f"A weight has numbers that are not finite, or that exceed {LARGEST:g}",
                "Use another copy of the model.",
            )
        yield some, numbers


def _shape(weight: PlainTensor) -> tuple[int, int]:
    if len(weight.shape) != 2 or not weight.values.numel():
        raise ModelFileError(f"A tensor of shape {list(weight.shape)} is not a matrix that can be quantized")
    return weight.shape[0], weight.shape[1]
