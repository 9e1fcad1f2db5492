"""One interface for packing a weight in any tile layout, GGML or group."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from quant.cpu import ggml_tiles, group_tiles
from quant.cpu.ggml_formats import GGML_FORMATS, GROUP, GGMLFormat, ggml_format_of
from quant.cpu.ggml_tiles import Bytes
from quant.cpu.group_formats import GROUP_FORMATS, GroupFormat, GroupTensor, group_format_of, groups_per_scale_of
from quant.tensor import BlockTensor, QTensor

Layout = GGMLFormat | GroupFormat
LAYOUTS: tuple[Layout, ...] = (*GGML_FORMATS, *GROUP_FORMATS)


class Unpack(Protocol):
    """Restores a weight of `shape` from its tiles and shared data, with the values that were packed."""

    def __call__(self, memory: Bytes, *, shape: tuple[int, int]) -> QTensor: ...


class Packing(Protocol):
    """Packs one weight whose columns are a multiple of 32. The properties raise UnsupportedQuantization."""

    @property
    def layout(self) -> Layout:
        """The layout that holds the weight exactly."""
        ...

    @property
    def groups_per_scale(self) -> int:
        """Number of groups of 32 columns that share a scale; 1 if the layout already defines it."""
        ...

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile."""
        ...

    @property
    def shared_bytes(self) -> int:
        """Bytes of the data that all tiles share, stored after them."""
        ...

    def pack(self, out: Bytes, shared: Bytes) -> None:
        """Write the tiles, an even number of them, to `out`, and the data that they share to `shared`.

        `shared` must be zeros. Raises UnsupportedQuantization for values that kernels cannot read.
        """
        ...

    @property
    def unpack(self) -> Unpack:
        """A function that reads weights of this layout back. It holds no reference to the weight."""
        ...


@dataclass(frozen=True, slots=True)
class GGMLPacking:
    """A weight of a GGUF file, or a plain weight. See `Packing`."""

    weight: BlockTensor

    @property
    def layout(self) -> GGMLFormat:
        return ggml_format_of(self.weight)

    @property
    def groups_per_scale(self) -> int:
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
class GroupPacking:
    """A quantized weight of a safetensors file. See `Packing`."""

    weight: GroupTensor

    @property
    def layout(self) -> GroupFormat:
        return group_format_of(self.weight)

    @property
    def groups_per_scale(self) -> int:
        return groups_per_scale_of(self.weight)

    @property
    def tile_bytes(self) -> int:
        return self.layout.tile_bytes(self.weight.shape[1] // GROUP, self.groups_per_scale)

    @property
    def shared_bytes(self) -> int:
        return group_tiles.shared_bytes(self.weight)

    def pack(self, out: Bytes, shared: Bytes) -> None:
        group_tiles.pack(self.weight, out, shared)

    @property
    def unpack(self) -> Unpack:
        return partial(group_tiles.unpack, layout=self.layout)


def packing_of(weight: QTensor) -> Packing:
    return GGMLPacking(weight) if isinstance(weight, BlockTensor) else GroupPacking(weight)


def layouts_of(samples: Iterable[QTensor]) -> frozenset[Layout]:
    """Return the layouts that hold these matrices. Raises UnsupportedQuantization."""
    return frozenset(packing_of(sample).layout for sample in samples)
