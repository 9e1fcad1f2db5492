"""Decode the blocks of a GGUF tensor to its canonical form.

A format is a row of the table BLOCKS: the positions of the fields in a block. To add a format, add a row and, if it
stores bits in a new order, a function that reorders them. Layouts: ggml's `block_q4_0` and its siblings. All functions
work on words of four adjacent columns, one byte each, from which the planes of the canonical form are built. Callers
check the bytes.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quant.errors import UnsupportedQuantization
from quant.ggml_types import GGMLType
from quant.tensor import BlockTensor, CodedTensor, Integers, PlainTensor, Plane, Scale

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Read = Callable[[int, int], memoryview]  # returns a range of the bytes of a tensor

CHUNK = 1 << 21  # number of codes that are read at once
SLAB = 1 << 18  # number of codes that are reordered at once; they fit into the processor's cache
# sign bit of a float16: files store negated minimums, which are added; the canonical form subtracts minimums
SIGN = 0x8000

IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# values of the E2M1 codes, doubled so that they are integers
E2M1_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


# -- codes: each class returns words, [rows, blocks, columns of a block / 4]


@dataclass(frozen=True, slots=True)
class Codes:
    """A plane of codes. Every 16 columns are stored in 16 consecutive bytes.

    `runs` has the first byte and the bit position of each such run.
    """

    bits: int
    runs: tuple[tuple[int, int], ...]
    flip: int = 0

    def words(self, blocks: Bytes) -> Words:
        mask = np.uint32(((1 << self.bits) - 1) * 0x01010101)
        out = np.empty((*blocks.shape[:2], 4 * len(self.runs)), np.uint32)
        for index, (at, bit) in enumerate(self.runs):
            run = np.ascontiguousarray(blocks[:, :, at : at + 16]).view("<u4")
            target = out[:, :, 4 * index : 4 * index + 4]
            np.bitwise_and(run >> np.uint32(bit) if bit else run, mask, out=target)
        return out ^ np.uint32(self.flip) if self.flip else out


@dataclass(frozen=True, slots=True)
class FifthBits:
    """One bit for each of 32 columns, stored in four bytes."""

    at: int
    bits: int = 1

    def words(self, blocks: Bytes) -> Words:
        row = np.ascontiguousarray(blocks[:, :, self.at : self.at + 4]).view("<u4")
        four = (row >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(0xF)
        # Multiply to get four copies of the four bits, seven apart: bit k of the first is then at bit 8 * k.
        return (four * np.uint32(0x00204081)) & np.uint32(0x01010101)


@dataclass(frozen=True, slots=True)
class Trits:
    """TQ1_0: five codes of 0, 1, or 2 per byte, as the base-3 digits of a fraction. Repacked to two bits each."""

    bits: int = 2

    def words(self, blocks: Bytes) -> Words:
        parts = []
        for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
            powers = (3 ** np.arange(digits, dtype=np.uint8)).astype(np.uint8).reshape(-1, 1)
            # wraps modulo 256 on purpose: this drops the digits before the radix point
            rest = blocks[:, :, None, start:stop] * powers
            parts.append(((rest.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(*blocks.shape[:2], -1))
        return np.concatenate(parts, axis=-1).view("<u4")


def _halves(at: int) -> tuple[tuple[int, int], ...]:
    """Return the runs for nibbles: columns 0 to 15 in the low halves of 16 bytes, and columns 16 to 31 in the high
    halves.
    """
    return ((at, 0), (at, 4))


def _spread(at: int, bits: int, spans: int) -> tuple[tuple[int, int], ...]:
    """Return the runs for 32 bytes whose lowest bits hold 32 columns, the next bits the next 32 columns, and so on."""
    runs = [(at + 32 * span, bit) for span in range(spans) for bit in range(0, 8, bits)]
    return tuple((first + 16 * half, bit) for first, bit in runs[:8] for half in (0, 1))


# -- scales: each function returns small integers, [rows, blocks, groups of a block]


def _nibbles(blocks: Bytes, at: int, *, high: bool) -> Bytes:
    """Q2_K: sixteen scales and sixteen minimums of four bits, one of each in a byte."""
    field = blocks[:, :, at : at + 16]
    return field >> np.uint8(4) if high else field & np.uint8(0x0F)


def _six_bits(blocks: Bytes, at: int, *, minimum: bool) -> Bytes:
    """Return the six-bit scales or minimums of Q4_K and Q5_K: eight of each in twelve bytes."""
    first, second, third = (blocks[:, :, at + i : at + i + 4] for i in (0, 4, 8))
    low, high = (second, third >> 4) if minimum else (first, third & 0x0F)
    top = (second if minimum else first) >> 6
    return np.concatenate([low & 0x3F, high | top << 4], axis=-1)


def _sixteen_six_bits(blocks: Bytes, at: int) -> Bytes:
    """Q3_K: the low four bits of sixteen scales in eight bytes, their high two bits in four."""
    low, high = blocks[:, :, at : at + 8], blocks[:, :, at + 8 : at + 12]
    lows = np.concatenate([low & 0x0F, low >> 4], axis=-1)
    highs = np.concatenate([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], axis=-1)
    both: Bytes = lows | highs
    return both


def _iq4_xs_scales(blocks: Bytes) -> Bytes:
    """IQ4_XS: the high two bits of eight scales in a 16-bit word at byte 2, and the low four bits in the next four
    bytes.
    """
    low = np.stack([blocks[:, :, 4:8] & 0x0F, blocks[:, :, 4:8] >> 4], axis=-1).reshape(*blocks.shape[:2], 8)
    high = np.repeat(blocks[:, :, 2:4], 4, axis=-1) >> np.array([0, 2, 4, 6] * 2, np.uint8) & 3
    both: Bytes = low | high << 4
    return both


@dataclass(frozen=True, slots=True)
class ScaleField:
    """The position of a scale in a block: a float16 or a one-byte exponent, and the sub-scales that multiply it."""

    at: int
    exponent: bool = False
    sub_scales: Callable[[Bytes], Bytes] | None = None
    planes: tuple[int, ...] = (8,)  # bits of each plane of the sub-scales
    sub_scale_zero: int = 0
    unit: float = 1.0  # factor of all scales; a power of two


@dataclass(frozen=True, slots=True)
class Block:
    """The layout of a block of one type. Codes are in planes, the low bits first."""

    group: int  # columns that share a scale
    codes: tuple[Codes | FifthBits | Trits, ...]
    scale: ScaleField
    zero: int = 0
    minimum: ScaleField | None = None
    table: tuple[int, ...] | None = None
    size_ratio: float = 1.03  # upper limit of the canonical form's size, relative to the size in the file


BLOCKS = {
    "Q4_0": Block(32, (Codes(4, _halves(2)),), ScaleField(0), zero=8),
    "Q4_1": Block(32, (Codes(4, _halves(4)),), ScaleField(0), minimum=ScaleField(2)),
    "Q5_0": Block(32, (Codes(4, _halves(6)), FifthBits(2)), ScaleField(0), zero=16),
    "Q5_1": Block(32, (Codes(4, _halves(8)), FifthBits(4)), ScaleField(0), minimum=ScaleField(2)),
    "Q8_0": Block(32, (Codes(8, ((2, 0), (18, 0)), flip=0x80808080),), ScaleField(0), zero=128),
    "Q2_K": Block(
        16, (Codes(2, _spread(16, 2, 2)),),
        ScaleField(80, sub_scales=lambda b: _nibbles(b, 0, high=False), planes=(4,)),
        minimum=ScaleField(82, sub_scales=lambda b: _nibbles(b, 0, high=True), planes=(4,)),
    ),
    "Q3_K": Block(
        16, (Codes(2, _spread(32, 2, 2)), Codes(1, _spread(0, 1, 1))),
        ScaleField(108, sub_scales=lambda b: _sixteen_six_bits(b, 96), planes=(4, 2), sub_scale_zero=32), zero=4,
    ),
    "Q4_K": Block(
        32, (Codes(4, _spread(16, 4, 4)),), ScaleField(0, sub_scales=lambda b: _six_bits(b, 4, minimum=False)),
        minimum=ScaleField(2, sub_scales=lambda b: _six_bits(b, 4, minimum=True)),
    ),
    "Q5_K": Block(
        32, (Codes(4, _spread(48, 4, 4)), Codes(1, _spread(16, 1, 1))),
        ScaleField(0, sub_scales=lambda b: _six_bits(b, 4, minimum=False)),
        minimum=ScaleField(2, sub_scales=lambda b: _six_bits(b, 4, minimum=True)),
    ),
    "Q6_K": Block(
        16,
        (
            Codes(4, tuple((64 * half + at, bit) for half in (0, 1) for bit in (0, 4) for at in (0, 16, 32, 48))),
            Codes(2, _spread(128, 2, 2)),
        ),
        ScaleField(208, sub_scales=lambda b: b[:, :, 192:208] ^ np.uint8(0x80), sub_scale_zero=128), zero=32,
    ),
    "IQ4_NL": Block(32, (Codes(4, _halves(2)),), ScaleField(0), table=IQ4_NUMBERS),
    "IQ4_XS": Block(
        32, (Codes(4, tuple((8 + 16 * group, bit) for group in range(8) for bit in (0, 4))),),
        ScaleField(0, sub_scales=_iq4_xs_scales, sub_scale_zero=32), table=IQ4_NUMBERS,
    ),
    "MXFP4": Block(32, (Codes(4, _halves(1)),), ScaleField(0, exponent=True), table=E2M1_NUMBERS),
    "TQ1_0": Block(256, (Trits(),), ScaleField(52), zero=1, size_ratio=1.23),
    "TQ2_0": Block(256, (Codes(2, _spread(0, 2, 2)),), ScaleField(64), zero=1),
}  # fmt: skip
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def decode(kind: GGMLType, data: memoryview, shape: tuple[int, ...]) -> BlockTensor:
    """Decode a tensor stored as `kind` into a new tensor in canonical form.

    `data` holds exactly the tensor's bytes; `shape` is row-major. Raises UnsupportedQuantization for a type without a
    row in BLOCKS, or for a quantized tensor that is not a matrix.
    """
    return decode_read(kind, lambda start, end: data[start:end], shape)


def decode_read(kind: GGMLType, read: Read, shape: tuple[int, ...]) -> BlockTensor:
    """Decode a tensor as `decode` does. `read` returns its bytes, and its errors are raised.

    Only a part of a quantized tensor is read at once. A writable result of `read` may become part of the tensor.
    """
    if kind.name in PLAIN_TYPES:
        data = read(0, kind.nbytes(math.prod(shape)))
        values = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=PLAIN_TYPES[kind.name])
        return PlainTensor(shape, kind.name, values.reshape(shape))
    if kind.name not in BLOCKS:
        known = ", ".join([*PLAIN_TYPES, *BLOCKS])
        raise UnsupportedQuantization(
            f"Weights of type {kind.name} are not supported by this version", f"Supported types: {known}."
        )
    if len(shape) != 2:
        raise UnsupportedQuantization(f"A {kind.name} tensor of {len(shape)} dimensions is not supported")
    rows, columns = shape
    block = BLOCKS[kind.name]
    arrays = iter(_joined(rows, _chunks(kind, block, read, (rows, columns))))
    return CodedTensor(
        shape=(rows, columns),
        type_name=kind.name,
        group=block.group,
        codes=Integers(tuple(_plane_of(part.bits, next(arrays)) for part in block.codes)),
        scale=_scale(block.scale, arrays),
        zero=block.zero,
        minimum=None if block.minimum is None else _scale(block.minimum, arrays),
        table=block.table,
    )


def _chunks(kind: GGMLType, block: Block, read: Read, shape: tuple[int, int]) -> Iterator[tuple[slice, list[Array]]]:
    """Yield the arrays of some rows at a time: the planes of the codes, then those of the scales and minimums."""
    rows, columns = shape
    count = columns // kind.block_elements
    size, step = count * kind.block_bytes, max(1, CHUNK // columns)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        blocks = np.frombuffer(read(first * size, last * size), np.uint8).reshape(last - first, count, kind.block_bytes)
        arrays: list[Array] = [_packed(it.bits, _slabs(it.words, blocks, columns), blocks) for it in block.codes]
        arrays += _scale_arrays(block.scale, blocks)
        if block.minimum is not None:
            arrays += _scale_arrays(block.minimum, blocks, flip=SIGN)
        yield slice(first, last), arrays


def _joined(rows: int, chunks: Iterator[tuple[slice, list[Array]]]) -> list[Array]:
    """Return arrays of `rows` rows from those of successive chunks."""
    chunk, first = next(chunks)
    if chunk == slice(0, rows):
        return first
    joined = [np.empty((rows, *array.shape[1:]), array.dtype) for array in first]
    for part, arrays in chain([(chunk, first)], chunks):
        for whole, array in zip(joined, arrays, strict=True):
            whole[part] = array
    return joined


def _slabs(words: Callable[[Bytes], Words], blocks: Bytes, columns: int) -> Iterable[tuple[slice, Words]]:
    """Yield the words of a slab of rows at a time, so that intermediate results are small."""
    step = max(1, SLAB // columns)
    for first in range(0, len(blocks), step):
        rows = slice(first, min(first + step, len(blocks)))
        yield rows, words(blocks[rows])


def _packed(bits: int, slabs: Iterable[tuple[slice, Words]], blocks: Bytes) -> Words:
    """Pack words of four codes with `bits` bits each."""
    out: Words | None = None
    for rows, words in slabs:
        fours = words.reshape(len(words), -1, 8 // bits)
        if out is None:
            out = np.empty((len(blocks), fours.shape[1]), np.uint32)
        packed = out[rows]
        packed[:] = fours[:, :, 0]
        for index in range(1, 8 // bits):
            packed |= fours[:, :, index] << np.uint32(bits * index)
    return np.empty((len(blocks), 0), np.uint32) if out is None else out


def _plane_of(bits: int, words: Array) -> Plane:
    return Plane(bits, torch.from_numpy(words.view(np.uint8)))


def _scale_arrays(field: ScaleField, blocks: Bytes, flip: int = 0) -> list[Array]:
    """Return the block scales, and the planes of the sub-scales if there are any."""
    if field.exponent:
        return [blocks[:, :, field.at].copy()]
    block_scales = _half_field(blocks, field.at, flip if field.sub_scales is None else 0)
    if field.sub_scales is None:
        return [block_scales]
    return [block_scales, *_packed_integers(field.sub_scales(blocks).reshape(len(blocks), -1), field.planes)]


def _scale(field: ScaleField, arrays: Iterator[Array]) -> Scale:
    """Return the scale whose arrays are the next ones of `arrays`."""
    block_scales = torch.from_numpy(next(arrays))
    if field.sub_scales is None:
        return Scale(block_scales, unit=field.unit)
    small = Integers(tuple(_plane_of(bits, next(arrays)) for bits in field.planes))
    return Scale(block_scales, small, field.sub_scale_zero, field.unit)


def integers(values: Bytes, planes: tuple[int, ...]) -> Integers:
    """Pack small unsigned integers, [rows, n], into planes of these bits."""
    return Integers(tuple(map(_plane_of, planes, _packed_integers(values, planes))))


def _packed_integers(values: Bytes, planes: tuple[int, ...]) -> Iterator[Words]:
    shift = 0
    for bits in planes:
        part = np.ascontiguousarray(values >> shift & ((1 << bits) - 1))
        yield _packed(bits, [(slice(None), part.view("<u4"))], part)
        shift += bits


def _half_field(blocks: Bytes, at: int, flip: int = 0) -> NDArray[np.float16]:
    """Return the float16 at byte `at` of every block, [rows, blocks of a row], with its bits XORed with `flip`."""
    field = np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<u2")[:, :, 0]
    return (field ^ np.uint16(flip)).view(np.float16)
