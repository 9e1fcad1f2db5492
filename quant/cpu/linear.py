"""Linear layers over packed tiles.

Adjacent segments of equal layout are joined to one part, so that q, k, and v of one type take one product. Recorded
programs read `parts`; `forward` computes a layer with one thread.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from quant.cpu.activations import FORM_KERNELS, Form, row_bytes, write_row
from quant.cpu.arena import Arena, Region
from quant.cpu.ggml_formats import GROUP, PAIR, TILE
from quant.cpu.kernel import jit
from quant.cpu.layouts import Layout, Unpack, packing_of
from quant.cpu.matmul import TILE_KERNELS, forms_of, multiply_pair
from quant.cpu.native import address_of
from quant.cpu.rows import ROW_KERNELS, read_row
from quant.errors import UnsupportedQuantization
from quant.kernels.reference import dequantize
from quant.linear import QLinear, Use
from quant.tensor import GroupedTensor, QTensor


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a weight in one layout."""

    layout: Layout
    region: Region
    first: int  # index of the first row among the layer's outputs
    rows: int
    groups: int  # number of groups of 32 columns
    tile_bytes: int
    unpack: Unpack
    order: Region | None = None  # int32: index of the input that each column is multiplied by; None: in order

    def tile_kernels(self, form: Form) -> tuple[int, int, int, int]:
        """Return the addresses of the kernels for one, two, four, and six tokens. An address is 0 if there is no such
        kernel.
        """
        kernels = TILE_KERNELS[self.layout, form]
        six = address_of(kernels.six) if kernels.six else 0
        return address_of(kernels.one), address_of(kernels.two), address_of(kernels.four), six

    @property
    def row_kernel(self) -> int:
        return address_of(ROW_KERNELS[self.layout])

    def address(self, row: int) -> int:
        """Return the address of the tile with output row `row`; row - first must be a multiple of PAIR."""
        if (row - self.first) % PAIR:
            raise UnsupportedQuantization(
                f"A fused projection with {row - self.first} rows, not a multiple of {PAIR}, has no CPU kernel",
                "Use the reference kernels: --kernels reference.",
            )
        return self.region.address + (row - self.first) // TILE * self.tile_bytes


class CpuLinear:
    """A QLinear in tiles. `activations` is the form of the input rows that quantized weights are multiplied by."""

    def __init__(self, segments: Sequence[QTensor], arena: Arena, activations: Form) -> None:
        self.outputs = sum(segment.shape[0] for segment in segments)
        self.inputs = segments[0].shape[1]
        self._activations = activations
        if self.inputs % GROUP:
            raise UnsupportedQuantization(
                f"A weight of {self.inputs} columns, not a multiple of {GROUP}, has no CPU kernel",
                "Use the reference kernels: --kernels reference.",
            )
        self.parts = tuple(_pack_parts(segments, arena))

    def form(self, part: Part) -> Form:
        """Return the form of activations for a part: floats for weights of floats, and integers for integers.

        With 8 bits, weights in super-blocks need activations in super-blocks.
        """
        coarse = forms_of(part.layout)[0]
        return self._activations if self._activations is Form.BITS_14 and coarse is not Form.FLOAT else coarse

    def source(self, part: Part) -> tuple[Form, int]:
        """Return a key for the input rows that a part reads: their form, and the address of the column order.

        Parts with equal keys read the same rows.
        """
        return self.form(part), part.order.address if part.order else 0

    def part_of(self, row: int) -> Part:
        """Return the part that holds an output row."""
        return next(part for part in self.parts if part.first <= row < part.first + part.rows)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, inputs] float32 -> [tokens, outputs] float32, with one thread."""
        x, out = x.contiguous(), torch.empty(len(x), self.outputs)
        groups = self.inputs // GROUP
        for part in self.parts:
            form = self.form(part)
            stride = row_bytes(form, self.inputs)
            rows = torch.empty(len(x), stride, dtype=torch.uint8)
            write, taken = address_of(FORM_KERNELS[form].write_row), _in_column_order(x, part)
            _write_rows(write, taken.data_ptr(), len(x), groups, rows.data_ptr(), stride)
            at = out.data_ptr() + 4 * part.first
            _multiply(
                *part.tile_kernels(form), part.region.address, part.tile_bytes, groups, part.rows,
                rows.data_ptr(), stride, len(x), at, 4 * self.outputs,
            )  # fmt: skip
        return out

    def rows(self, ids: Tensor) -> Tensor:
        (part,) = self.parts
        out = torch.empty(len(ids), self.inputs)
        for index, row in enumerate(ids.tolist()):
            if not 0 <= row < self.outputs:
                raise IndexError(f"row {row} is not within the {self.outputs} rows of the weight")
            _read_row(part.row_kernel, part.region.address, part.tile_bytes, part.groups, row, out[index].data_ptr())
        return _in_input_order(out, part)

    def dequantize(self) -> Tensor:
        values = [
            _in_input_order(dequantize(part.unpack(part.region.bytes, shape=(part.rows, self.inputs))), part)
            for part in self.parts
        ]
        return values[0] if len(values) == 1 else torch.cat(values)


def cpu_layer(weight: QLinear) -> CpuLinear:
    """Return a layer of the CPU backend. Raises TypeError for any other."""
    if not isinstance(weight, CpuLinear):
        raise TypeError(f"{type(weight).__name__} is not a layer of the CPU backend")
    return weight


def _in_column_order(x: Tensor, part: Part) -> Tensor:
    """Return rows of activations in the order of a part's columns."""
    return x if part.order is None else x[:, part.order.view(np.int32, x.shape[1])]


def _in_input_order(rows: Tensor, part: Part) -> Tensor:
    """Return rows of a part's weight in the order of the inputs."""
    if part.order is None:
        return rows
    restored = torch.empty_like(rows)
    restored[:, part.order.view(np.int32, rows.shape[1])] = rows
    return restored


def _pack_parts(segments: Sequence[QTensor], arena: Arena) -> Iterator[Part]:
    first, orders = 0, _Orders(arena)
    for (layout, _, order, _), group in groupby(_joinable(segments, orders), key=lambda entry: entry[0]):
        members = [segment for _, segment in group]
        packings = [packing_of(segment) for segment in members]
        size, unpack = packings[0].tile_bytes, packings[0].unpack
        sizes = [-(-segment.shape[0] // PAIR) * 2 * size for segment in members]
        shared = [packing.shared_bytes for packing in packings]
        region = arena.allocate("weight", sum(sizes) + sum(shared))
        ends = list(accumulate([*sizes, *shared]))  # the tiles of all segments, then the shared data of each
        fields = [region.bytes[end - length : end] for length, end in zip([*sizes, *shared], ends, strict=True)]
        for packing, tiles, behind in zip(packings, fields, fields[len(members) :], strict=False):
            packing.pack(tiles, behind)
        rows = sum(segment.shape[0] for segment in members)
        yield Part(layout, region, first, rows, members[0].shape[1] // GROUP, size, unpack, orders.regions[order])
        first += rows


class _Orders:
    """The column orders of a layer's segments. Equal orders have the same number and the same memory."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._known: list[Tensor | None] = [None]
        self.regions: list[Region | None] = [None]

    def number(self, segment: QTensor) -> int:
        order = segment.order if isinstance(segment, GroupedTensor) else None
        if order is None:
            return 0
        for number, known in enumerate(self._known):
            if known is not None and torch.equal(order, known):
                return number
        region = self._arena.allocate("order", order.nbytes)
        region.view(np.int32, len(order))[:] = order.numpy()
        self._known.append(order)
        self.regions.append(region)
        return len(self._known) - 1


Key = tuple[Layout, int, int, int]


def _joinable(segments: Sequence[QTensor], orders: _Orders) -> Iterator[tuple[Key, QTensor]]:
    """Yield each segment with a key. Adjacent segments with equal keys are joined.

    Pairs of tiles must not straddle segments.
    """
    break_number = 0
    for segment in segments:
        packing = packing_of(segment)
        yield (packing.layout, packing.groups_per_scale, orders.number(segment), break_number), segment
        break_number += segment.shape[0] % PAIR != 0


class CpuBackend:
    """Makes `CpuLinear` layers, all with their weights in one arena."""

    name = "cpu"

    def __init__(self, arena: Arena, activations: Form = Form.BITS_14) -> None:
        self._arena = arena
        self._activations = activations

    def linear(self, segments: Sequence[QTensor], use: Use = Use.PRODUCTS) -> CpuLinear:
        return CpuLinear(segments, self._arena, self._activations)

    def experts(self, layers: Iterable[Sequence[QTensor]], count: int) -> tuple[QLinear, ...]:
        return tuple(map(self.linear, layers))

    def to_device(self, values: Tensor) -> Tensor:
        return values


@jit
def _read_row(row_kernel: int, w: int, tile_bytes: int, groups: int, row: int, out: int) -> None:
    read_row(row_kernel, w, tile_bytes, groups, row, out)


@jit
def _write_rows(kernel: int, x: int, n: int, groups: int, out: int, stride: int) -> None:
    for m in range(n):
        write_row(kernel, x + 4 * GROUP * groups * m, groups, out + stride * m)


@jit
def _multiply(
    one: int, two: int, four: int, six: int, weight: int, tile_bytes: int, groups: int, rows: int, x: int,
    x_stride: int, n: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    for first in range(0, rows, PAIR):
        at, here = weight + first // TILE * tile_bytes, min(PAIR, rows - first)
        y = out + 4 * first
        multiply_pair(one, two, four, six, at, tile_bytes, groups, x, x_stride, n, y, out_stride, 0, here)
