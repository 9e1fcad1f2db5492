"""From the blocks of a GGUF tensor to its canonical form.

A format is a row of a table here: where in a block its fields lie. Adding one is a row and, where the bits are laid out
in a new way, a function that reorders them. Layouts: ggml's `block_q4_0` and its siblings.

Knows block layouts. Refuses to know files (it is handed bytes that were checked) and arithmetic on values.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quant.errors import UnsupportedQuantization
from quant.ggml_types import GGMLType
from quant.tensor import AffineTensor, PlainTensor, QTensor

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class AffineBlock:
    """A block of 32 columns: a float16 scale at byte 0, a float16 minimum or none, then the codes to the block's end.

    Four-bit codes come as 16 bytes: columns 0 to 15 in the low halves, 16 to 31 in the high ones.
    """

    bits: int
    codes_at: int
    zero: int = 0
    minimum_at: int | None = None


AFFINE_BLOCKS = {
    "Q4_0": AffineBlock(bits=4, codes_at=2, zero=8),
    "Q4_1": AffineBlock(bits=4, codes_at=4, minimum_at=2),
    "Q8_0": AffineBlock(bits=8, codes_at=2),
}
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def decode(kind: GGMLType, data: memoryview, shape: tuple[int, ...]) -> QTensor:
    """The canonical form of a tensor stored as `kind`.

    `data` holds exactly the tensor's bytes and is copied; `shape` is row-major. Raises UnsupportedQuantization for a
    type without a row here, or for a quantized tensor that is not a matrix.
    """
    if kind.name in PLAIN_TYPES:
        values = torch.frombuffer(bytearray(data), dtype=PLAIN_TYPES[kind.name])
        return PlainTensor(shape, kind.name, values.reshape(shape))
    if kind.name not in AFFINE_BLOCKS:
        known = ", ".join([*PLAIN_TYPES, *AFFINE_BLOCKS])
        raise UnsupportedQuantization(
            f"Weights of type {kind.name} are not supported by this version", f"Types that are: {known}."
        )
    if len(shape) != 2:
        raise UnsupportedQuantization(f"A {kind.name} tensor of {len(shape)} dimensions is not supported")
    rows, columns = shape
    blocks = np.frombuffer(data, np.uint8).reshape(rows, columns // kind.block_elements, kind.block_bytes)
    return _affine(kind, AFFINE_BLOCKS[kind.name], blocks, (rows, columns))


def _affine(kind: GGMLType, block: AffineBlock, blocks: Bytes, shape: tuple[int, int]) -> AffineTensor:
    raw = blocks[:, :, block.codes_at :]
    codes = torch.from_numpy(raw.copy() if block.bits == 8 else _in_column_order(raw))
    return AffineTensor(
        shape=shape,
        type_name=kind.name,
        bits=block.bits,
        group=kind.block_elements,
        codes=(codes.view(torch.int8) if block.bits == 8 else codes).reshape(shape[0], -1),
        scales=_half_field(blocks, 0),
        zero=block.zero,
        # The format adds its minimum and the canonical form subtracts it: only the sign bit differs.
        minimums=None if block.minimum_at is None else _half_field(blocks, block.minimum_at, flip=0x8000),
    )


def _half_field(blocks: Bytes, at: int, flip: int = 0) -> Tensor:
    """The float16 at byte `at` of every block, [rows, blocks of a row], its bits exclusive-ored with `flip`."""
    field = np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<u2")[:, :, 0]
    return torch.from_numpy((field ^ np.uint16(flip)).view(np.float16))


def _in_column_order(halves: Bytes) -> Bytes:
    """Four-bit codes of 32 columns, [..., 16]: from low and high halves 16 columns apart to neighbours in one byte."""
    low, high = halves & 0x0F, halves >> 4
    return np.concatenate([half[..., 0::2] | half[..., 1::2] << 4 for half in (low, high)], axis=-1)
