"""Every layout that a weight may have in tiles, and how one weight is packed: callers need not know the two tables."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from quant.cpu import ggml_tiles, group_tiles
from quant.cpu.formats import FORMATS, GROUP, TileFormat, format_of
from quant.cpu.ggml_tiles import Bytes
from quant.cpu.span_formats import SPAN_FORMATS, SpanFormat, SpanTensor, span_format_of, span_of
from quant.tensor import BlockTensor, QTensor

Layout = TileFormat | SpanFormat
LAYOUTS: tuple[Layout, ...] = (*FORMATS, *SPAN_FORMATS)


class Unpack(Protocol):
    """Makes a weight of `shape` from its tiles and what lies behind them, with the values that were packed."""

    def __call__(self, memory: Bytes, *, shape: tuple[int, int]) -> QTensor: ...


class Packing(Protocol):
    """How one weight of 32 * n columns is packed. Its properties raise UnsupportedQuantization, naming what does not
    fit."""

    @property
    def layout(self) -> Layout:
        """The layout that holds the weight exactly."""
        ...

    @property
    def span(self) -> int:
        """Groups of 32 columns that share a scale, where the layout does not say it; else 1."""
        ...

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile."""
        ...

    @property
    def shared_bytes(self) -> int:
        """Bytes of what all tiles share, apart from them."""
        ...

    def pack(self, out: Bytes, shared: Bytes) -> None:
        """Fill `out` with the tiles, an even number of them, and `shared`, zeros so far, with what they share.

        Raises UnsupportedQuantization for values that kernels cannot read.
        """
        ...

    @property
    def unpack(self) -> Unpack:
        """What reads weights of this layout back. Holds no weight."""
        ...


@dataclass(frozen=True, slots=True)
class BlockPacking:
    """A weight of a GGUF file, or a plain one. See `Packing`."""

    weight: BlockTensor

    @property
    def layout(self) -> TileFormat:
        return format_of(self.weight)

    @property
    def span(self) -> int:
        return 1

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def tile_bytes(self) -> int:
        return self.layout.tile_bytes(self.weight.shape[1] // GROUP)

    def pack(self, out: Bytes, shared: Bytes) -> None:
        ggml_tiles.pack(self.weight, out)

    @property
    def unpack(self) -> Unpack:
        return partial(ggml_tiles.unpack, layout=self.layout)


@dataclass(frozen=True, slots=True)
class SpanPacking:
    """A quantized weight of a safetensors file. See `Packing`."""

    weight: SpanTensor

    @property
    def layout(self) -> SpanFormat:
        return span_format_of(self.weight)

    @property
    def span(self) -> int:
        return span_of(self.weight)

    @property
    def tile_bytes(self) -> int:
        return self.layout.tile_bytes(self.weight.shape[1] // GROUP, self.span)

    @property
    def shared_bytes(self) -> int:
        return group_tiles.shared_bytes(self.weight)

    def pack(self, out: Bytes, shared: Bytes) -> None:
        group_tiles.pack(self.weight, out, shared)

    @property
    def unpack(self) -> Unpack:
        return partial(group_tiles.unpack, layout=self.layout)


def packing_of(weight: QTensor) -> Packing:
    return BlockPacking(weight) if isinstance(weight, BlockTensor) else SpanPacking(weight)


def layouts_of(samples: Iterable[QTensor]) -> frozenset[Layout]:
    """The layouts that hold these matrices. Raises UnsupportedQuantization."""
    return frozenset(packing_of(sample).layout for sample in samples)
