"""Packed tiles of GGML formats: a weight in the order in which its kernel reads it, one sequential stream per tile.

A tile is 16 rows, stored group by group of 32 columns. Separate streams for codes and scales would halve the bandwidth
of the processor's prefetcher. A group has:

- codes: for each plane of `bits` bits, `bits` vectors of 64 bytes. Byte 4 row + k of vector v has, at bit bits * j,
  column 4 * (8 / bits * v + j) + k: one word of the canonical form for each row. So one load of 64 bytes, shifted, is
  multiplied by four bytes of activations in every lane.
- codes of 6 bits: three vectors store four chunks of codes. The low six bits of each vector are one of the first three
  chunks. The top two bits of vector v are bits 2 v and 2 v + 1 of the fourth chunk. So three of four chunks are decoded
  in one instruction instead of three.
- scales of 16 rows, see `Scales`. Block scales are stored before the first group of a block, and so are sub-minimums,
  in pairs of two halves or two groups, since they are read once per block.
- plain floats: 32 columns of 16 values each.

Rows are padded with zeros to an even number of tiles. Nothing is rounded: packing moves bits and flips sign bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quant.cpu.ggml_formats import GROUP, PAIR, TILE, GGMLFormat, Scales, SubScales, ggml_format_of
from quant.ggml_blocks import integers
from quant.tensor import BlockTensor, CodedTensor, Integers, PlainTensor, Plane, Scale

SIGN = np.int16(-0x8000)  # sign bit of a float16
SIGN_OF_BYTE = np.uint8(0x80)
# masks for 6-bit codes
LOW_TWO, LOW_FOUR, HIGH_TWO = np.uint32(0x03030303), np.uint32(0x0F0F0F0F), np.uint32(0x30303030)

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]


def packed_bytes(weight: BlockTensor) -> int:
    """Return the number of bytes that `pack` writes. The weight's columns must be a multiple of 32."""
    rows, columns = weight.shape
    return -(-rows // PAIR) * 2 * ggml_format_of(weight).tile_bytes(columns // GROUP)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Views of the fields of packed tiles, each [tiles, blocks, ...], for both packing and unpacking."""

    layout: GGMLFormat
    blocks: Bytes  # [tiles, blocks, block_bytes]

    @property
    def _groups(self) -> Bytes:
        """Return the bytes of every group, [tiles, blocks, groups of a block, group_bytes]."""
        tiles, blocks, _ = self.blocks.shape
        layout = self.layout
        return self.blocks[:, :, layout.head_bytes :].reshape(
            tiles, blocks, layout.scales.block_groups, layout.group_bytes
        )

    @property
    def words(self) -> list[Words]:
        """Return the codes of each plane, [tiles, blocks, groups, words of a row, TILE].

        6-bit codes that are packed without planes are returned together.
        """
        layout, words = self.layout, self._groups[..., : self.layout.codes_bytes].view(np.uint32)
        planes = (layout.bits,) if layout.is_packed6 else layout.planes
        ends = list(accumulate(planes))
        words = words.reshape(*words.shape[:-1], layout.bits, TILE)
        return [words[..., end - bits : end, :] for bits, end in zip(planes, ends, strict=True)]

    def block_scales(self, index: int) -> Bytes:
        """Return the block scales (index 0) or block minimums (index 1), [tiles, blocks, TILE * bytes]."""
        size = self.layout.scales.block_scale_bytes // (1 + self.layout.scales.minimum)
        start = 0 if self.layout.head_bytes else self.layout.codes_bytes
        return self.blocks[:, :, start + size * index : start + size * (index + 1)]

    @property
    def sub_scales(self) -> Bytes:
        """Return the sub-scales, [tiles, blocks, groups, bytes]."""
        return self._groups[..., self.layout.codes_bytes :]

    @property
    def sub_minimums(self) -> Bytes:
        """Return the sub-minimums, [tiles, blocks, pairs, bytes]."""
        tiles, blocks, _ = self.blocks.shape
        scales = self.layout.scales
        field = self.blocks[:, :, scales.block_scale_bytes : self.layout.head_bytes]
        return field.reshape(tiles, blocks, scales.block_groups * scales.halves // 2, -1)


def _fields(layout: GGMLFormat, memory: Bytes, rows: int, columns: int) -> _Fields:
    tiles = -(-rows // PAIR) * 2
    return _Fields(layout, memory.reshape(tiles, columns // GROUP // layout.scales.block_groups, layout.block_bytes))


def row_tiles(values: NDArray[Any], tiles: int) -> NDArray[Any]:
    """Reshape [rows, ...] to [tiles, TILE, ...]. Missing rows at the end are zeros."""
    if len(values) != tiles * TILE:
        padded = np.zeros((tiles * TILE, *values.shape[1:]), values.dtype)
        padded[: len(values)] = values
        values = padded
    return values.reshape(tiles, TILE, *values.shape[1:])


def pack(weight: BlockTensor, out: Bytes) -> None:
    """Write the tiles of a matrix to `out`, whose size must be `packed_bytes`."""
    layout, (rows, columns) = ggml_format_of(weight), weight.shape
    if isinstance(weight, PlainTensor):
        _pack_plain(weight.values, out.reshape(-1, columns // GROUP, layout.group_bytes))
        return
    fields = _fields(layout, out, rows, columns)
    tiles = len(fields.blocks)
    _pack_codes(weight.codes, fields)
    for index, scale in enumerate((weight.scale, weight.minimum) if weight.minimum else (weight.scale,)):
        stored = scale.block_scales.numpy() if layout.scales.exponent else scale.block_scales.view(torch.int16).numpy()
        if index:
            stored = stored ^ SIGN  # kernels add the minimum, so its sign is flipped
        fields.block_scales(index).view(stored.dtype)[:] = row_tiles(stored, tiles).transpose(0, 2, 1)
        if scale.sub_scales and index:
            _pack_sub_minimums(scale.sub_scales, layout.scales, fields.sub_minimums)
        elif scale.sub_scales:
            _pack_sub_scales(scale.sub_scales, layout.scales, fields.sub_scales)


def _pack_codes(codes: Integers, fields: _Fields) -> None:
    tiles, blocks, _ = fields.blocks.shape
    shape = tiles, TILE, blocks, fields.layout.scales.block_groups
    planes = [
        row_tiles(plane.data.numpy().view(np.uint32), tiles).reshape(*shape, plane.bits).transpose(0, 2, 3, 4, 1)
        for plane in codes.planes
    ]
    if fields.layout.is_packed6:
        # tile by tile, so that the data stays in the processor's cache
        for target, low, high in zip(fields.words[0], *planes, strict=True):
            target[:] = _pack6(low, high)
    else:
        for target, plane in zip(fields.words, planes, strict=True):
            target[:] = plane


def _pack6(low: Words, high: Words) -> Words:
    """Combine words of 4-bit and 2-bit codes, [..., 4, TILE] and [..., 2, TILE], into words of 6-bit codes, [..., 6,
    TILE].
    """
    even, odd, top = (np.ascontiguousarray(plane) for plane in (low[..., ::2, :], low[..., 1::2, :], high))
    fourth = odd >> 4 & LOW_FOUR | top >> 2 & HIGH_TWO
    packed = (
        even & LOW_FOUR | top << 4 & HIGH_TWO | (fourth & LOW_TWO) << 6,
        even >> 4 & LOW_FOUR | top << 2 & HIGH_TWO | (fourth >> 2 & LOW_TWO) << 6,
        odd & LOW_FOUR | top & HIGH_TWO | (fourth >> 4 & LOW_TWO) << 6,
    )
    return np.stack(packed, -2).reshape(*low.shape[:-2], 6, TILE)


def _unpack6(packed: Words) -> list[Words]:
    """Split words of 6-bit codes into words of 4 and of 2 bits: the inverse of `_pack6`."""
    first, second, third = np.moveaxis(packed.reshape(*packed.shape[:-2], 2, 3, TILE), -2, 0)
    fourth = first >> 6 & LOW_TWO | (second >> 6 & LOW_TWO) << 2 | (third >> 6 & LOW_TWO) << 4
    even, odd = first & LOW_FOUR | (second & LOW_FOUR) << 4, third & LOW_FOUR | (fourth & LOW_FOUR) << 4
    high = [(code >> 4 & LOW_TWO) << 2 * index for index, code in enumerate((first, second, third, fourth))]
    return [np.stack([even, odd], -2).reshape(*packed.shape[:-2], 4, TILE), np.bitwise_or.reduce(high)]


def _pack_sub_scales(sub_scales: Integers, scales: Scales, target: Bytes) -> None:
    tiles, blocks, groups, _ = target.shape
    values = row_tiles(sub_scales.values().numpy(), tiles).reshape(tiles, TILE, blocks, groups, scales.halves)
    values, at, shift = values.transpose(0, 2, 3, 4, 1), 0, 0  # [tiles, blocks, groups, halves, TILE]
    if scales.sub_scales and scales.sub_scales.signed:
        values = values ^ SIGN_OF_BYTE
    for bits in scales.sub_scales.planes if scales.sub_scales else ():
        stored = _CODECS[bits].write(values >> np.uint8(shift) & np.uint8((1 << bits) - 1))
        target[..., at : at + stored.shape[-1]] = stored
        at, shift = at + stored.shape[-1], shift + bits


@dataclass(frozen=True, slots=True)
class _Codec:
    """Stores one plane of sub-scales, [..., halves, TILE] -> [..., bytes], and reads it back."""

    write: Callable[[Bytes], Bytes]
    read: Callable[[Bytes], Bytes]


def _write_bytes(part: Bytes) -> Bytes:
    return part.reshape(*part.shape[:-2], -1)


def _read_bytes(stored: Bytes) -> Bytes:
    return stored.reshape(*stored.shape[:-1], -1, TILE)


def _write_nibbles(part: Bytes) -> Bytes:
    """Store the sub-scales of two halves in one byte for each row."""
    both: Bytes = part[..., 0, :] | part[..., 1, :] << np.uint8(4)
    return both


def _read_nibbles(stored: Bytes) -> Bytes:
    return np.stack([stored & np.uint8(0x0F), stored >> np.uint8(4)], axis=-2)


def _write_words(part: Bytes) -> Bytes:
    """Store a word of 32 bits for each half, with row r at bit 2 r."""
    words = np.bitwise_or.reduce(part.astype("<u4") << np.arange(0, 32, 2, dtype=np.uint32), axis=-1)
    return np.ascontiguousarray(words, "<u4").view(np.uint8)


def _read_words(stored: Bytes) -> Bytes:
    words = np.ascontiguousarray(stored).view("<u4")
    return (words[..., None] >> np.arange(0, 32, 2, dtype=np.uint32) & np.uint32(3)).astype(np.uint8)


_CODECS = {
    8: _Codec(_write_bytes, _read_bytes),
    4: _Codec(_write_nibbles, _read_nibbles),
    2: _Codec(_write_words, _read_words),
}


def _pack_sub_minimums(sub_scales: Integers, scales: Scales, target: Bytes) -> None:
    tiles, blocks, pairs, _ = target.shape
    values = row_tiles(sub_scales.values().numpy(), tiles).reshape(tiles, TILE, blocks, pairs, 2)
    if scales.halves == 2:
        target[:] = _write_nibbles(values.transpose(0, 2, 3, 4, 1))
    else:
        target.view(np.uint16)[:] = values.view(np.uint16)[..., 0].transpose(0, 2, 3, 1)


def _unpack_sub_minimums(stored: Bytes, scales: Scales) -> Bytes:
    """Return the sub-minimums, [tiles, blocks, groups, halves, TILE]."""
    tiles, blocks, pairs, _ = stored.shape
    if scales.halves == 2:
        return _read_nibbles(stored)
    return np.moveaxis(stored.reshape(tiles, blocks, pairs, TILE, 2), -1, 3).reshape(tiles, blocks, 2 * pairs, 1, TILE)


def _pack_plain(values: Tensor, target: Bytes) -> None:
    rows, columns = values.shape
    bits = values.view(torch.int16 if values.itemsize == 2 else torch.int32).numpy()
    grouped = row_tiles(bits.reshape(rows, columns // GROUP, GROUP), len(target))
    target.view(bits.dtype).reshape(len(target), -1, GROUP, TILE)[:] = grouped.transpose(0, 2, 3, 1)


def unpack(weight: Bytes, layout: GGMLFormat, shape: tuple[int, int]) -> BlockTensor:
    """Return the canonical form of packed tiles: the inverse of `pack`."""
    rows, columns = shape
    if layout.plain is not None:
        kind = torch.int16 if layout.bits == 16 else torch.int32
        source = weight.view(np.int16 if layout.bits == 16 else np.int32).reshape(-1, columns // GROUP, GROUP, TILE)
        stored = torch.from_numpy(source.transpose(0, 3, 1, 2).reshape(-1, columns)[:rows].copy())
        return PlainTensor(shape, str(kind), stored.view(layout.plain))
    fields = _fields(layout, weight, rows, columns)
    words = _unpack6(fields.words[0]) if layout.is_packed6 else fields.words
    planes = [
        Plane(bits, torch.from_numpy(rows_of(plane, rows).view(np.uint8)))
        for bits, plane in zip(layout.planes, words, strict=True)
    ]
    scales = [_unpack_scale(fields, index, rows) for index in range(1 + layout.scales.minimum)]
    table = tuple(number - layout.zero for number in layout.table) if layout.table else None
    return CodedTensor(
        shape=shape,
        type_name=f"packed {layout.number}",
        group=layout.scales.columns,
        codes=Integers(tuple(planes)),
        scale=scales[0],
        zero=0 if table else layout.zero,
        minimum=scales[1] if layout.scales.minimum else None,
        table=table,
    )


def rows_of(tiled: NDArray[Any], rows: int) -> NDArray[Any]:
    """Join the rows of all tiles: [tiles, ..., TILE] -> [rows, ...]."""
    return np.ascontiguousarray(np.moveaxis(tiled, -1, 1).reshape(len(tiled) * TILE, -1)[:rows])


def _unpack_scale(fields: _Fields, index: int, rows: int) -> Scale:
    scales = fields.layout.scales
    stored = rows_of(fields.block_scales(index).view(np.uint8 if scales.exponent else np.int16), rows)
    if index:
        stored = stored ^ SIGN
    values = torch.from_numpy(stored if scales.exponent else stored.view(np.float16))
    unit = 1.0 if index else scales.unit
    if scales.sub_scales is None:
        return Scale(values, unit=unit)
    if index:
        small = _unpack_sub_minimums(fields.sub_minimums, scales)
    else:
        small = _unpack_sub_scales(fields.sub_scales, scales, scales.sub_scales)
    return Scale(values, integers(rows_of(small, rows), scales.sub_scales.planes), scales.sub_scales.zero, unit)


def _unpack_sub_scales(stored: Bytes, scales: Scales, sub_scales: SubScales) -> Bytes:
    """Return the sub-scales, [tiles, blocks, groups, halves, TILE]."""
    at, shift = 0, 0
    small = np.zeros((*stored.shape[:-1], scales.halves, TILE), np.uint8)
    for bits in sub_scales.planes:
        size = TILE * bits * scales.halves // 8
        small |= _CODECS[bits].read(stored[..., at : at + size]) << np.uint8(shift)
        at, shift = at + size, shift + bits
    return small ^ SIGN_OF_BYTE if sub_scales.signed else small
