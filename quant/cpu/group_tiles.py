"""Packed tiles of weights in scale groups of any length: convert the canonical form to tiles, and back.

A tile is 16 rows in one sequential stream, like the tiles of `quant.cpu.ggml_tiles`, with a header:

    [header: 64 bytes] then for each scale group [scales] [zero points] and its groups of 32 columns, codes only

- header: see `Word`.
- scales: one for each of 16 rows, or one for all rows.
- zero points of 16 rows: a byte each; four bits of rows r and r + 8 in byte r; or two bits of row r at bit 2 r.
- codes: as in other tiles. 8-bit floats: word 16 h + r of vector v has columns 4 v + 2 h and 4 v + 2 h + 1 of row r.

The data that nested scales share is stored after the tiles of a weight: their table, then the block scales, float32.
Rows are padded with zeros to an even number of tiles. Nothing is rounded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quant.cpu.ggml_formats import GROUP, PAIR, TILE
from quant.cpu.ggml_tiles import Bytes, row_tiles, rows_of
from quant.cpu.group_formats import HEADER_BYTES, GroupFormat, GroupTensor, Word, group_format_of, groups_per_scale_of
from quant.errors import UnsupportedQuantization
from quant.ggml_blocks import integers
from quant.tensor import Float8Tensor, GroupedTensor, GroupScale, Integers, NestedScale, Plane

_PAIRS = GROUP // 2  # words in a group; a word holds two columns
_TABLE = 256  # entries in the table of nested scales


@dataclass(frozen=True, slots=True)
class _ScaleGroups:
    """Adjacent scale groups of equal length, as views of packed tiles, [tiles, scale groups, ...]."""

    layout: GroupFormat
    first: int  # index of the first scale group
    first_group: int
    bytes: Bytes  # [tiles, scale groups, bytes of a scale group]

    @property
    def scales(self) -> NDArray[Any]:
        """Scales, [tiles, scale groups, rows], as integers of their width."""
        field = self.bytes[..., : self.layout.scale_bytes]
        return field.view(f"u{self.layout.scale.itemsize}")

    @property
    def zeros(self) -> Bytes:
        return self.bytes[..., self.layout.scale_bytes : self.layout.head_bytes]

    @property
    def groups(self) -> Bytes:
        """Codes, [tiles, scale groups, groups, bytes]."""
        field = self.bytes[..., self.layout.head_bytes :]
        return field.reshape(*field.shape[:2], -1, self.layout.group_bytes)

    def share_of(self, values: NDArray[Any]) -> NDArray[Any]:
        """Select the values of these scale groups from [tiles, TILE, scale groups of a row, ...]."""
        return values[:, :, self.first : self.first + self.bytes.shape[1]]


def _scale_groups(layout: GroupFormat, memory: Bytes, groups: int, groups_per_scale: int) -> Iterator[_ScaleGroups]:
    """Yield the scale groups of tiles [tiles, bytes of a tile], and last a shorter group if there is one."""
    full, rest = divmod(groups, groups_per_scale)
    size, body = layout.head_bytes + groups_per_scale * layout.group_bytes, memory[:, HEADER_BYTES:]
    if full:
        yield _ScaleGroups(layout, 0, 0, body[:, : full * size].reshape(len(memory), full, size))
    if rest:
        yield _ScaleGroups(layout, full, full * groups_per_scale, body[:, None, full * size :])


def _tile_count(rows: int) -> int:
    return -(-rows // PAIR) * 2


def shared_bytes(weight: GroupTensor) -> int:
    """Return the size in bytes of the data that the tiles of a weight share. Block scales of padding rows are zeros."""
    if isinstance(weight, GroupedTensor) and isinstance(weight.scale, NestedScale):
        scales = _tile_count(weight.shape[0]) * TILE * weight.groups
        return 4 * (_TABLE + -(-scales // weight.scale.block_size))
    return 0


def pack(weight: GroupTensor, out: Bytes, shared: Bytes) -> None:
    """Write the tiles of a matrix, an even number of them, to `out`, and the data that they share to `shared`.

    `shared` must be zeros. Raises UnsupportedQuantization for NaN in e4m3, which kernels would read as a finite value.
    """
    layout, groups_per_scale, (rows, columns) = group_format_of(weight), groups_per_scale_of(weight), weight.shape
    memory = out.reshape(_tile_count(rows), -1)
    header = memory[:, :HEADER_BYTES].view(np.int64)
    header[:], header[:, Word.GROUPS_PER_SCALE] = 0, groups_per_scale
    scale_groups = list(_scale_groups(layout, memory, columns // GROUP, groups_per_scale))
    if isinstance(weight, Float8Tensor):
        _pack_floats(weight, scale_groups, len(memory))
        return
    _pack_codes(weight.codes, scale_groups, len(memory))
    if isinstance(weight.zero, Integers):
        _pack_zeros(weight.zero.values()[:, : weight.groups].numpy(), scale_groups, len(memory))
    if isinstance(weight.scale, NestedScale):
        _pack_scales(weight.scale.codes, scale_groups, len(memory))
        _share(weight.scale, header, shared)
    else:
        _pack_scales(weight.scale.factors(), scale_groups, len(memory))


def _share(scale: NestedScale, header: NDArray[np.int64], shared: Bytes) -> None:
    """Write the shared data, and the fields of each tile's header that locate it."""
    values, groups = shared.view(np.float32), scale.codes.shape[1]
    values[:_TABLE] = scale.table.numpy()
    values[_TABLE : _TABLE + len(scale.block_scales)] = scale.block_scales.numpy()
    tiles = np.arange(len(header))
    header[:, Word.SHARED] = shared.ctypes.data - (header.ctypes.data + tiles * header.strides[0])
    header[:, Word.FIRST], header[:, Word.PER_ROW] = tiles * TILE * groups, groups
    header[:, Word.SHIFT], header[:, Word.OFFSET] = (
        scale.block_size.bit_length() - 1,
        np.float32(scale.offset).view(np.int32),
    )


def _pack_codes(codes: Integers, scale_groups: list[_ScaleGroups], tiles: int) -> None:
    (plane,) = codes.planes
    words = row_tiles(plane.data.numpy().view(np.uint32), tiles)
    for some in scale_groups:
        count, groups = some.groups.shape[1:3]
        target = some.groups.view(np.uint32).reshape(tiles, count, groups, plane.bits, TILE)
        here = words[:, :, some.first_group * plane.bits :][:, :, : count * groups * plane.bits]
        target[:] = here.reshape(tiles, TILE, count, groups, plane.bits).transpose(0, 2, 3, 4, 1)


def _pack_scales(values: Tensor, scale_groups: list[_ScaleGroups], tiles: int) -> None:
    """Pack scales [rows, scale groups], or [tiles, scale groups] if a tile's rows share them."""
    bits = values.contiguous().view(_INTEGERS[values.itemsize]).numpy()
    for some in scale_groups:
        width = some.layout.rows
        by_tile = row_tiles(bits, tiles) if width == TILE else bits[:, None]
        some.scales[:] = some.share_of(by_tile).transpose(0, 2, 1).view(some.scales.dtype)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _pack_zeros(zeros: Bytes, scale_groups: list[_ScaleGroups], tiles: int) -> None:
    values = row_tiles(zeros, tiles)
    for some in scale_groups:
        here = some.share_of(values).transpose(0, 2, 1)
        bits = some.layout.codes.bits
        if bits == 8:
            some.zeros[:] = here
        elif bits == 4:
            some.zeros[:] = here[..., :8] | here[..., 8:] << np.uint8(4)
        else:
            words = np.bitwise_or.reduce(here.astype("<u4") << np.arange(0, 32, 2, dtype=np.uint32), axis=-1)
            some.zeros[:] = words[..., None].view(np.uint8)


def _pack_floats(weight: Float8Tensor, scale_groups: list[_ScaleGroups], tiles: int) -> None:
    values, layout = weight.values.view(torch.uint8).numpy(), scale_groups[0].layout
    if layout.float8 is torch.float8_e4m3fn and (values & 0x7F == 0x7F).any():
        raise UnsupportedQuantization(
            f"A {weight.type_name} weight has NaN elements", "The file is damaged: pull it again."
        )
    words = row_tiles(values.view(np.uint16), tiles)
    for some in scale_groups:
        count, groups = some.groups.shape[1:3]
        target = some.groups.view(np.uint16).reshape(tiles, count, groups, _PAIRS, TILE)
        here = words[:, :, some.first_group * _PAIRS :][:, :, : count * groups * _PAIRS]
        target[:] = here.reshape(tiles, TILE, count, groups, _PAIRS).transpose(0, 2, 3, 4, 1)
    scale = weight.scale.float()
    if layout.rows == 1:
        first_rows = torch.arange(tiles) * TILE
        scale = scale[(first_rows // weight.block[0]).clamp(max=len(scale) - 1)]
    _pack_scales(scale, scale_groups, tiles)


# -- unpacking


def unpack(memory: Bytes, layout: GroupFormat, shape: tuple[int, int]) -> GroupTensor:
    """Return the canonical form with the values that were packed. Nested scales are returned multiplied out."""
    rows, groups = shape[0], shape[1] // GROUP
    groups_per_scale = int(memory[:8].view(np.int64)[0])
    count, size = _tile_count(rows), layout.tile_bytes(groups, groups_per_scale)
    tiles = memory[: count * size].reshape(count, size)
    scale_groups = list(_scale_groups(layout, tiles, groups, groups_per_scale))
    if layout.float8 is not None:
        return _unpack_floats(scale_groups, layout.float8, shape, groups_per_scale)
    scale = _joined([some.scales for some in scale_groups], rows)
    if layout.nested:
        scale = np.concatenate(
            [
                _nested_values(memory, tile * size, scale[first : first + TILE])
                for tile, first in enumerate(range(0, rows, TILE))
            ]
        )
    stored = torch.from_numpy(scale.view(np.int16 if scale.itemsize == 2 else np.float32))
    return GroupedTensor(
        shape=shape,
        type_name=f"packed {layout.number}",
        group=groups_per_scale * GROUP,
        codes=Integers((Plane(layout.codes.bits, torch.from_numpy(_unpack_codes(scale_groups, rows))),)),
        scale=GroupScale(stored if stored.dtype == torch.float32 else stored.view(layout.scale)),
        zero=_unpack_zeros(scale_groups, rows) if layout.zeros else layout.codes.zero,
        table=layout.numbers,
    )


def _joined(parts: list[NDArray[Any]], rows: int) -> NDArray[Any]:
    """Join [tiles, ..., TILE] of all scale groups to [rows, n]."""
    return np.ascontiguousarray(np.concatenate([rows_of(part, rows) for part in parts], axis=1))


def _unpack_codes(scale_groups: list[_ScaleGroups], rows: int) -> Bytes:
    words = [np.ascontiguousarray(some.groups).view(np.uint32) for some in scale_groups]
    return _joined([it.reshape(*it.shape[:3], -1, TILE) for it in words], rows).view(np.uint8)


def _unpack_zeros(scale_groups: list[_ScaleGroups], rows: int) -> Integers:
    bits = scale_groups[0].layout.codes.bits
    stored = [np.ascontiguousarray(some.zeros) for some in scale_groups]
    if bits == 4:
        stored = [np.concatenate([it & np.uint8(15), it >> np.uint8(4)], axis=-1) for it in stored]
    elif bits == 2:
        shifts = np.arange(0, 32, 2, dtype=np.uint32)
        stored = [(it.view("<u4") >> shifts & np.uint32(3)).astype(np.uint8) for it in stored]
    zeros = _joined(stored, rows)
    return integers(np.pad(zeros, ((0, 0), (0, -zeros.shape[1] % (32 // bits)))), (bits,))


def _nested_values(memory: Bytes, tile: int, codes: Bytes) -> NDArray[np.float32]:
    """Return the scales of the tile at byte `tile`, float32 [rows, scale groups]."""
    header = memory[tile : tile + HEADER_BYTES].view(np.int64)
    numbers = header[Word.FIRST] + np.arange(codes.size).reshape(codes.shape) >> header[Word.SHIFT]
    end = _TABLE + int(numbers.max()) + 1
    shared = np.frombuffer(memory, np.float32, end, tile + int(header[Word.SHARED]))
    offset = header[Word.OFFSET : Word.OFFSET + 1].astype(np.int32).view(np.float32)
    values: NDArray[np.float32] = shared[codes] * shared[_TABLE + numbers] + offset
    return values


def _unpack_floats(
    scale_groups: list[_ScaleGroups], kind: torch.dtype, shape: tuple[int, int], groups_per_scale: int
) -> Float8Tensor:
    layout, (rows, columns) = scale_groups[0].layout, shape
    words = [some.groups.view(np.uint16) for some in scale_groups]
    by_row = _joined([it.reshape(*it.shape[:3], _PAIRS, TILE) for it in words], rows)
    values = torch.from_numpy(by_row.view(np.uint8)).view(kind)
    tall = TILE if layout.rows == 1 else 1
    scale = np.concatenate([some.scales for some in scale_groups], axis=1)
    by_block = scale.transpose(0, 2, 1).reshape(-1, scale.shape[1])[: -(-rows // tall)]
    factors = torch.from_numpy(np.ascontiguousarray(by_block).view(np.float32))
    block = min(tall, rows), min(groups_per_scale * GROUP, columns)
    return Float8Tensor(shape, f"packed {layout.number}", values, factors, block)
