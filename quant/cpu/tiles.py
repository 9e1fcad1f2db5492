"""Packed tiles: a weight in the order in which its kernel reads it, one sequential stream of bytes a tile.

A tile is 16 rows, stored group by group of 32 columns. Two streams (codes here, scales there) would halve what the
processor's prefetcher delivers. Of one group:

- 4 bits: 256 bytes of codes, then 16 scales, then 16 minimums where the type has them, float16. Byte 64 j + 4 row + k
  has column 8 j + k in its low half and column 8 j + 4 + k in its high half.
- 8 bits: 512 bytes of code + 128, then 16 scales. Byte 64 j + 4 row + k is column 4 j + k.
- plain: 32 columns of 16 values each.

So one load of 64 bytes meets four bytes of activations in every lane. Rows are padded with zeros to an even number of
tiles. Nothing is rounded: packing moves bits, and flips sign bits. Knows layouts. Refuses to know how to multiply.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quant.errors import UnsupportedQuantization
from quant.tensor import AffineTensor, PlainTensor, QTensor

TILE = 16  # rows
PAIR = 2 * TILE
GROUP = 32  # columns

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TileFormat:
    """A row of the table of layouts. `number` is a word of recorded programs."""

    number: int
    bits: int
    zero: int = 0  # what an integer code of 0 is, where there is no minimum
    minimums: bool = False
    plain: torch.dtype | None = None

    @property
    def group_bytes(self) -> int:
        """Bytes of one group of one tile."""
        return TILE * GROUP * self.bits // 8 + (0 if self.plain else 2 * TILE * (1 + self.minimums))


AFFINE4_MIN = TileFormat(0, bits=4, minimums=True)
AFFINE4 = TileFormat(1, bits=4, zero=8)
AFFINE8 = TileFormat(2, bits=8, zero=128)
HALF = TileFormat(3, bits=16, plain=torch.float16)
BRAIN = TileFormat(4, bits=16, plain=torch.bfloat16)
SINGLE = TileFormat(5, bits=32, plain=torch.float32)
FORMATS = (AFFINE4_MIN, AFFINE4, AFFINE8, HALF, BRAIN, SINGLE)


def format_of(weight: QTensor) -> TileFormat:
    """The layout that holds `weight` exactly. Raises UnsupportedQuantization, naming what does not fit."""
    if isinstance(weight, PlainTensor):
        return next(f for f in FORMATS if f.plain is weight.values.dtype)
    if weight.group == GROUP and weight.bits == 4 and weight.minimums is not None and weight.zero == 0:
        return AFFINE4_MIN
    if weight.group == GROUP and weight.bits == 4 and weight.minimums is None and weight.zero == AFFINE4.zero:
        return AFFINE4
    if weight.group == GROUP and weight.bits == 8 and weight.minimums is None and weight.zero == 0:
        return AFFINE8
    raise UnsupportedQuantization(
        f"The CPU kernels have no layout for {weight.type_name} weights", "Use the plain kernels: --kernels reference."
    )


def packed_bytes(weight: QTensor) -> int:
    """Bytes that `pack` fills for a weight of 32 * n columns."""
    rows, columns = weight.shape
    return -(-rows // PAIR) * 2 * (columns // GROUP) * format_of(weight).group_bytes


def pack(weight: QTensor, out: Bytes) -> None:
    """Fill `out`, `packed_bytes` long, with the tiles of a matrix."""
    layout, (rows, columns) = format_of(weight), weight.shape
    tiles = -(-rows // PAIR) * 2
    target = out.reshape(tiles, columns // GROUP, layout.group_bytes)
    if rows % PAIR:
        target[rows // TILE :] = 0
    if isinstance(weight, PlainTensor):
        _pack_plain(weight.values, target)
    else:
        _pack_affine(weight, layout, target)


def _tiles(values: NDArray[Any], rows: int, tiles: int) -> NDArray[Any]:
    """[rows, groups, ...] -> [tiles, groups, TILE, ...], zeros behind the last row."""
    padded = np.zeros((tiles * TILE, *values.shape[1:]), values.dtype) if rows != tiles * TILE else None
    if padded is not None:
        padded[:rows] = values
        values = padded
    return values.reshape(tiles, TILE, *values.shape[1:]).swapaxes(1, 2)


def _pack_affine(weight: AffineTensor, layout: TileFormat, target: Bytes) -> None:
    (rows, columns), tiles = weight.shape, len(target)
    codes_end = TILE * GROUP * layout.bits // 8
    scales = [weight.scales.numpy()]
    if weight.minimums is not None:
        scales.append((weight.minimums.numpy().view(np.uint16) ^ 0x8000).view(np.float16))  # kernels add
    for index, field in enumerate(scales):
        at = codes_end + 2 * TILE * index
        target[:, :, at : at + 2 * TILE].view(np.float16)[:] = _tiles(field, rows, tiles)
    if layout.bits == 8:
        codes = (weight.codes.numpy().view(np.uint8) ^ 0x80).reshape(rows, columns // GROUP, 8, 4)
        chunks = _tiles(codes, rows, tiles).transpose(0, 1, 3, 2, 4)
        target[:, :, :codes_end].reshape(tiles, -1, 8, TILE, 4)[:] = chunks
        return
    # Canonical: the even column in the low half. Here: columns 8 j + k low and 8 j + 4 + k high.
    pairs = _tiles(weight.codes.numpy().reshape(rows, columns // GROUP, 4, 2, 2), rows, tiles)
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    mixed = np.empty((*first.shape[:-1], 4), np.uint8)
    mixed[..., 0::2] = (first & 0x0F) | (second << 4)
    mixed[..., 1::2] = (first >> 4) | (second & 0xF0)
    np.copyto(target[:, :, :codes_end].reshape(tiles, -1, 4, TILE, 4), mixed.transpose(0, 1, 3, 2, 4))


def _pack_plain(values: Tensor, target: Bytes) -> None:
    rows, columns = values.shape
    bits = values.view(torch.int16 if values.itemsize == 2 else torch.int32).numpy()
    grouped = _tiles(bits.reshape(rows, columns // GROUP, GROUP), rows, len(target))
    target.view(bits.dtype).reshape(len(target), -1, GROUP, TILE)[:] = grouped.swapaxes(2, 3)


def unpack(weight: Bytes, layout: TileFormat, shape: tuple[int, int]) -> QTensor:
    """The canonical form of packed tiles: what `pack` was given."""
    rows, columns = shape
    groups = columns // GROUP
    source = weight.reshape(-1, groups, layout.group_bytes)

    def flat(tiled: NDArray[Any]) -> NDArray[Any]:
        """[tiles, groups, TILE, n] -> [rows, groups * n]"""
        return np.ascontiguousarray(tiled.swapaxes(1, 2).reshape(len(source) * TILE, -1)[:rows])

    if layout.plain is not None:
        kind = torch.int16 if layout.bits == 16 else torch.int32
        tiled = source.view(np.int16 if layout.bits == 16 else np.int32).reshape(len(source), groups, GROUP, TILE)
        bits = torch.from_numpy(flat(tiled.swapaxes(2, 3)))
        return PlainTensor(shape, str(kind), bits.view(layout.plain))
    codes_end = TILE * GROUP * layout.bits // 8
    scales = flat(
        source[:, :, codes_end : codes_end + 2 * TILE].copy().view(np.float16).reshape(len(source), groups, TILE, 1)
    )
    chunks = source[:, :, :codes_end].reshape(len(source), groups, -1, TILE, 4).transpose(0, 1, 3, 2, 4)
    minimums = None
    if layout.minimums:
        field = source[:, :, codes_end + 2 * TILE :].copy().view(np.uint16) ^ 0x8000
        minimums = torch.from_numpy(flat(field.view(np.float16).reshape(len(source), groups, TILE, 1)))
    if layout.bits == 8:
        codes = torch.from_numpy(flat(chunks.reshape(len(source), groups, TILE, GROUP)) ^ 0x80).view(torch.int8)
    else:
        low, high = chunks & 0x0F, chunks >> 4
        columns_in_order = np.stack((low, high), axis=-2).reshape(len(source), groups, TILE, GROUP)
        codes = torch.from_numpy(flat(columns_in_order[..., 0::2] | columns_in_order[..., 1::2] << 4))
    return AffineTensor(
        shape=shape,
        type_name=f"packed {layout.number}",
        bits=layout.bits,
        group=GROUP,
        codes=codes,
        scales=torch.from_numpy(scales),
        zero=layout.zero if layout.bits == 4 else 0,
        minimums=minimums,
    )
