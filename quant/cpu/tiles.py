"""Packed tiles: a weight in the order in which its kernel reads it, one sequential stream of bytes a tile.

A tile is 16 rows, stored group by group of 32 columns. Two streams (codes here, scales there) would halve what the
processor's prefetcher delivers. Of one group:

- codes: for each plane of `bits` bits, `bits` vectors of 64 bytes. Byte 4 row + k of vector v has, at bit bits * j,
  column 4 * (8 / bits * v + j) + k: one word of the canonical form for each row. So one load of 64 bytes, shifted,
  meets four bytes of activations in every lane.
- then the group's scales, 16 rows side by side: see `Scales`. What several groups share lies before the first of them.
- plain floats: 32 columns of 16 values each.

Rows are padded with zeros to an even number of tiles. Nothing is rounded: packing moves bits, and flips sign bits.
Knows layouts. Refuses to know how to multiply.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quant.cpu.formats import GROUP, PAIR, TILE, Scales, TileFormat, format_of
from quant.ggml_blocks import integers
from quant.tensor import CodedTensor, Integers, PlainTensor, Plane, QTensor, Scale

SIGN = np.int16(-0x8000)  # of a float16

Bytes = NDArray[np.uint8]


def packed_bytes(weight: QTensor) -> int:
    """Bytes that `pack` fills for a weight of 32 * n columns."""
    rows, columns = weight.shape
    return -(-rows // PAIR) * 2 * format_of(weight).tile_bytes(columns // GROUP)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Views of the fields of packed tiles, each [tiles, spans, ...]: whoever writes or reads them says so once."""

    layout: TileFormat
    spans: Bytes  # [tiles, spans, span_bytes]

    @property
    def _groups(self) -> Bytes:
        """[tiles, spans, groups of a span, group_bytes]"""
        tiles, spans, _ = self.spans.shape
        layout = self.layout
        return self.spans[:, :, layout.head_bytes :].reshape(tiles, spans, layout.scales.span, layout.group_bytes)

    def words(self, plane: int) -> NDArray[np.uint32]:
        """Codes of one plane, [tiles, spans, groups, words of a row, TILE]"""
        bits, before = self.layout.planes[plane], sum(self.layout.planes[:plane])
        field = self._groups[..., 64 * before : 64 * (before + bits)].view(np.uint32)
        return field.reshape(*field.shape[:-1], bits, TILE)

    def wholes(self, place: int) -> Bytes:
        """The scales (0) or minimums (1) themselves, [tiles, spans, TILE * bytes]"""
        size = self.layout.scales.whole_bytes // (1 + self.layout.scales.minimum)
        start = 0 if self.layout.head_bytes else self.layout.codes_bytes
        return self.spans[:, :, start + size * place : start + size * (place + 1)]

    def parts(self, place: int) -> Bytes:
        """The parts of scales (0) or minimums (1), [tiles, spans, groups, bytes]"""
        size = self.layout.scales.parts_bytes // (1 + self.layout.scales.minimum)
        start = self.layout.codes_bytes + size * place
        return self._groups[..., start : start + size]


def _fields(layout: TileFormat, memory: Bytes, rows: int, columns: int) -> _Fields:
    tiles = -(-rows // PAIR) * 2
    return _Fields(layout, memory.reshape(tiles, columns // GROUP // layout.scales.span, layout.span_bytes))


def _tiles(values: NDArray[Any], tiles: int) -> NDArray[Any]:
    """[rows, ...] -> [tiles, TILE, ...], zeros behind the last row."""
    if len(values) != tiles * TILE:
        padded = np.zeros((tiles * TILE, *values.shape[1:]), values.dtype)
        padded[: len(values)] = values
        values = padded
    return values.reshape(tiles, TILE, *values.shape[1:])


def pack(weight: QTensor, out: Bytes) -> None:
    """Fill `out`, `packed_bytes` long, with the tiles of a matrix."""
    layout, (rows, columns) = format_of(weight), weight.shape
    if isinstance(weight, PlainTensor):
        _pack_plain(weight.values, out.reshape(-1, columns // GROUP, layout.group_bytes))
        return
    fields = _fields(layout, out, rows, columns)
    tiles, spans, _ = fields.spans.shape
    for index, plane in enumerate(weight.codes.planes):
        words = _tiles(plane.data.numpy().view(np.uint32), tiles)
        fields.words(index)[:] = words.reshape(tiles, TILE, spans, layout.scales.span, -1).transpose(0, 2, 3, 4, 1)
    for place, scale in enumerate((weight.scale, weight.minimum) if weight.minimum else (weight.scale,)):
        whole = scale.whole.numpy() if layout.scales.exponent else scale.whole.view(torch.int16).numpy()
        if place:
            whole = whole ^ SIGN  # kernels add
        fields.wholes(place).view(whole.dtype)[:] = _tiles(whole, tiles).transpose(0, 2, 1)
        if scale.parts:
            _pack_parts(scale.parts, layout.scales, fields.parts(place))


def _pack_parts(parts: Integers, scales: Scales, target: Bytes) -> None:
    tiles, spans, groups, _ = target.shape
    values = _tiles(parts.values().numpy(), tiles).reshape(tiles, TILE, spans, groups, scales.halves)
    values, at, shift = values.transpose(0, 2, 3, 4, 1), 0, 0  # [tiles, spans, groups, halves, TILE]
    for bits in scales.parts.planes if scales.parts else ():
        stored = _STORING[bits].write(values >> np.uint8(shift) & np.uint8((1 << bits) - 1))
        target[..., at : at + stored.shape[-1]] = stored
        at, shift = at + stored.shape[-1], shift + bits


@dataclass(frozen=True, slots=True)
class _Storing:
    """How parts of some bits are stored, [..., halves, TILE] -> [..., bytes], and read back."""

    write: Callable[[Bytes], Bytes]
    read: Callable[[Bytes], Bytes]


def _write_bytes(part: Bytes) -> Bytes:
    return part.reshape(*part.shape[:-2], -1)


def _read_bytes(stored: Bytes) -> Bytes:
    return stored.reshape(*stored.shape[:-1], -1, TILE)


def _write_nibbles(part: Bytes) -> Bytes:
    """Two halves in one byte of each row."""
    both: Bytes = part[..., 0, :] | part[..., 1, :] << np.uint8(4)
    return both


def _read_nibbles(stored: Bytes) -> Bytes:
    return np.stack([stored & np.uint8(0x0F), stored >> np.uint8(4)], axis=-2)


def _write_words(part: Bytes) -> Bytes:
    """A word of 32 bits for each half: row r at bit 2 r."""
    words = np.bitwise_or.reduce(part.astype("<u4") << np.arange(0, 32, 2, dtype=np.uint32), axis=-1)
    return np.ascontiguousarray(words, "<u4").view(np.uint8)


def _read_words(stored: Bytes) -> Bytes:
    words = np.ascontiguousarray(stored).view("<u4")
    return (words[..., None] >> np.arange(0, 32, 2, dtype=np.uint32) & np.uint32(3)).astype(np.uint8)


_STORING = {
    8: _Storing(_write_bytes, _read_bytes),
    4: _Storing(_write_nibbles, _read_nibbles),
    2: _Storing(_write_words, _read_words),
}


def _pack_plain(values: Tensor, target: Bytes) -> None:
    rows, columns = values.shape
    bits = values.view(torch.int16 if values.itemsize == 2 else torch.int32).numpy()
    grouped = _tiles(bits.reshape(rows, columns // GROUP, GROUP), len(target))
    target.view(bits.dtype).reshape(len(target), -1, GROUP, TILE)[:] = grouped.transpose(0, 2, 3, 1)


def unpack(weight: Bytes, layout: TileFormat, shape: tuple[int, int]) -> QTensor:
    """The canonical form of packed tiles: what `pack` was given."""
    rows, columns = shape
    if layout.plain is not None:
        kind = torch.int16 if layout.bits == 16 else torch.int32
        source = weight.view(np.int16 if layout.bits == 16 else np.int32).reshape(-1, columns // GROUP, GROUP, TILE)
        whole = torch.from_numpy(source.transpose(0, 3, 1, 2).reshape(-1, columns)[:rows].copy())
        return PlainTensor(shape, str(kind), whole.view(layout.plain))
    fields = _fields(layout, weight, rows, columns)
    planes = [
        Plane(bits, torch.from_numpy(_rows(fields.words(index), rows).view(np.uint8)))
        for index, bits in enumerate(layout.planes)
    ]
    scales = [_unpack_scale(fields, place, rows) for place in range(1 + layout.scales.minimum)]
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


def _rows(tiled: NDArray[Any], rows: int) -> NDArray[Any]:
    """[tiles, ..., TILE] -> [rows, ...]"""
    return np.ascontiguousarray(np.moveaxis(tiled, -1, 1).reshape(len(tiled) * TILE, -1)[:rows])


def _unpack_scale(fields: _Fields, place: int, rows: int) -> Scale:
    scales = fields.layout.scales
    whole = _rows(fields.wholes(place).view(np.uint8 if scales.exponent else np.int16), rows)
    if place:
        whole = whole ^ SIGN
    values = torch.from_numpy(whole if scales.exponent else whole.view(np.float16))
    if scales.parts is None:
        return Scale(values)
    stored, at, shift = fields.parts(place), 0, 0
    small = np.zeros((*stored.shape[:-1], scales.halves, TILE), np.uint8)
    for bits in scales.parts.planes:
        size = TILE * bits * scales.halves // 8
        small |= _STORING[bits].read(stored[..., at : at + size]) << np.uint8(shift)
        at, shift = at + size, shift + bits
    return Scale(values, integers(_rows(small, rows), scales.parts.planes), scales.parts.offset)
