"""Random weights of every group format, as safetensors checkpoints hold them."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from quant.bitsandbytes import FP4, NF4
from quant.packed_integers import pack
from quant.tensor import Float8Tensor, GroupedTensor, GroupScale, Integers, NestedScale, blocks

Rng = np.random.Generator
ROW = 1 << 20  # larger than any matrix, so that a group or block spans the whole dimension


@dataclass(frozen=True)
class Coded:
    """Weights of integers, or of numbers in a table."""

    bits: int = 4
    group: int = 128
    scale: torch.dtype = torch.float16
    zeros: bool = False
    table: tuple[float, ...] | None = None
    nested: bool = False
    order: int = 0  # seed of a random order of columns; 0: in order

    @property
    def floats(self) -> bool:
        return self.table is not None

    def make(self, rows: int, columns: int, rng: Rng) -> GroupedTensor:
        group = min(self.group, columns)
        groups = -(-columns // group)

        def integers(count: int) -> Integers:
            values = rng.integers(0, 1 << self.bits, (rows, count), np.uint8)
            return pack((rows, count), self.bits, lambda some: values[some])

        plain = GroupScale(_scales(rng, rows, groups).to(self.scale))
        scale = _nested(rows, groups, rng) if self.nested else plain
        zero = 0 if self.table else integers(groups) if self.zeros else 1 << (self.bits - 1)
        order = torch.from_numpy(np.random.default_rng(self.order).permutation(columns)).int() if self.order else None
        return GroupedTensor((rows, columns), "CODED", group, integers(columns), scale, zero, self.table, order)


def _scales(rng: Rng, rows: int, groups: int) -> torch.Tensor:
    return torch.from_numpy((rng.standard_normal((rows, groups)) * 0.05).astype(np.float32))


def _nested(rows: int, groups: int, rng: Rng) -> NestedScale:
    """Return nested scales as bitsandbytes writes them: one block scale for 256 consecutive scales of any rows."""
    return NestedScale(
        torch.from_numpy(rng.integers(0, 256, (rows, groups), np.uint8)),
        torch.from_numpy(np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)),
        torch.from_numpy(rng.uniform(0.01, 0.1, -(-rows * groups // 256)).astype(np.float32)),
        256,
        0.0472,
    )


@dataclass(frozen=True)
class Float8:
    """Weights of 8-bit floats that contain every finite value."""

    kind: torch.dtype = torch.float8_e4m3fn
    block: tuple[int, int] = (1, ROW)
    scale: torch.dtype = torch.float32
    floats: ClassVar[bool] = True

    def make(self, rows: int, columns: int, rng: Rng) -> Float8Tensor:
        block = min(self.block[0], rows), min(self.block[1], columns)
        codes = rng.integers(0, 256, (rows, columns), np.uint8)
        endless = 0x7F if self.kind is torch.float8_e4m3fn else 0x7C
        codes[codes & endless == endless] = 0x38
        down, across = blocks((rows, columns), block)
        scale = (_scales(rng, down, across) * 0.01).to(self.scale)
        return Float8Tensor((rows, columns), "FLOAT8", torch.from_numpy(codes).view(self.kind), scale, block)


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E5M2 = torch.float8_e5m2

Kind = Coded | Float8
GROUP_TYPES: dict[str, Kind] = {
    "int4 g128": Coded(),
    "int4 g128 zeros": Coded(zeros=True),
    "int4 g64": Coded(group=64, scale=BF16),
    "int4 g64 zeros": Coded(group=64, scale=BF16, zeros=True),
    "int4 g32": Coded(group=32, scale=F32),
    "int4 g32 zeros": Coded(group=32, zeros=True),
    "int4 channel": Coded(group=ROW, scale=F32),
    "int4 channel zeros": Coded(group=ROW, scale=F32, zeros=True),
    "int4 g96 zeros": Coded(group=96, zeros=True),
    "int8 channel": Coded(8, ROW, F32),
    "int8 g128": Coded(8),
    "int8 g128 bf16": Coded(8, scale=BF16),
    "int8 g32 zeros": Coded(8, 32, zeros=True),
    "int8 g64 zeros": Coded(8, 64, BF16, zeros=True),
    "int8 channel zeros": Coded(8, ROW, F32, zeros=True),
    "int2 g64": Coded(2, 64),
    "int2 g64 bf16": Coded(2, 64, BF16),
    "int2 channel": Coded(2, ROW, F32),
    "int2 g32 zeros": Coded(2, 32, zeros=True),
    "int2 g64 zeros": Coded(2, 64, BF16, zeros=True),
    "int2 g128 zeros": Coded(2, 128, F32, zeros=True),
    "e4m3 tensor": Float8(block=(ROW, ROW)),
    "e4m3 channel": Float8(scale=BF16),
    "e4m3 128x128": Float8(block=(128, 128)),
    "e4m3 48x96": Float8(block=(48, 96), scale=BF16),
    "e4m3 1x128": Float8(block=(1, 128)),
    "e5m2 tensor": Float8(E5M2, (ROW, ROW)),
    "e5m2 channel": Float8(E5M2),
    "nf4 g64": Coded(group=64, scale=F32, table=NF4),
    "nf4 g64 nested": Coded(group=64, table=NF4, nested=True),
    "fp4 g64": Coded(group=64, scale=F32, table=FP4),
    "fp4 g128 nested": Coded(group=128, table=FP4, nested=True),
}  # fmt: skip

# types whose columns are in one of two random orders
ORDERED = {
    "int4 g32 zeros 1": Coded(group=32, zeros=True, order=1),
    "int4 g32 zeros 2": Coded(group=32, zeros=True, order=2),
    "int8 channel 1": Coded(8, ROW, F32, order=1),
    "nf4 g64 2": Coded(group=64, scale=F32, table=NF4, order=2),
}
