"""Every layout there is, which one a weight has, and its packed form: whoever holds weights need not tell tables apart.

Refuses to know what a layout looks like.
"""

from collections.abc import Iterable

from quant.cpu import ggml_tiles, group_tiles, span_formats
from quant.cpu.formats import FORMATS, GROUP, TileFormat, format_of
from quant.cpu.ggml_tiles import Bytes
from quant.cpu.span_formats import SPAN_FORMATS, SpanFormat, span_format_of
from quant.tensor import BlockTensor, QTensor

Layout = TileFormat | SpanFormat
LAYOUTS: tuple[Layout, ...] = (*FORMATS, *SPAN_FORMATS)


def layout_of(weight: QTensor) -> Layout:
    """The layout that holds `weight` exactly. Raises UnsupportedQuantization, naming what does not fit."""
    return format_of(weight) if isinstance(weight, BlockTensor) else span_format_of(weight)


def layouts_of(samples: Iterable[QTensor]) -> frozenset[Layout]:
    """The layouts that hold these matrices. Raises UnsupportedQuantization."""
    return frozenset(map(layout_of, samples))


def span_of(weight: QTensor) -> int:
    """Groups of 32 columns that share a scale, where its layout does not say it; else 1.

    Raises UnsupportedQuantization where they are no whole groups.
    """
    return 1 if isinstance(weight, BlockTensor) else span_formats.span_of(weight)


def tile_bytes(weight: QTensor) -> int:
    """Bytes of one tile of a weight of 32 * n columns."""
    groups = weight.shape[1] // GROUP
    if isinstance(weight, BlockTensor):
        return format_of(weight).tile_bytes(groups)
    return span_format_of(weight).tile_bytes(groups, span_of(weight))


def shared_bytes(weight: QTensor) -> int:
    """Bytes of what all tiles of a weight share, apart from them."""
    return 0 if isinstance(weight, BlockTensor) else group_tiles.shared_bytes(weight)


def pack(weight: QTensor, out: Bytes, shared: Bytes) -> None:
    """Fill `out` with the tiles of a matrix, an even number of them, and `shared`, zeros so far, with what they share.

    Raises UnsupportedQuantization for values that kernels cannot read.
    """
    if isinstance(weight, BlockTensor):
        ggml_tiles.pack(weight, out)
    else:
        group_tiles.pack(weight, out, shared)


def unpack(memory: Bytes, layout: Layout, shape: tuple[int, int]) -> QTensor:
    """A weight of the values that were packed, from its tiles and what lies behind them."""
    if isinstance(layout, SpanFormat):
        return group_tiles.unpack(memory, layout, shape)
    return ggml_tiles.unpack(memory, layout, shape)
