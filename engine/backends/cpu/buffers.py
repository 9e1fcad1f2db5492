"""Buffers of one program: for constants, and for the values that instructions pass to each other.

A buffer is reused as soon as no Rows object refers to it.
"""

import weakref
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.backends.cpu.partials import partial_bytes
from engine.backends.cpu.program import Limits
from engine.errors import UnsupportedModel
from engine.kv.cache import LayerKV
from quant.cpu.activations import Form, row_bytes
from quant.cpu.arena import Arena, Region

USE_REFERENCE = "Use the reference kernels: --kernels reference."
COPY_ALIGNMENT = 128  # bytes; the copies of two threads must not share a cache line


def check_multiple(what: str, width: int, of: int) -> None:
    """Raise UnsupportedModel if a width is not a multiple of the columns that a kernel processes at a time."""
    if width % of:
        message = f"{what} has no CPU kernel: the width is not a multiple of {of}"
        raise UnsupportedModel(message, USE_REFERENCE)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory for rows of one width and form (see `Form`)."""

    region: Region
    stride: int  # bytes between rows
    copy: int  # bytes between the threads' copies of row 0; 0: all threads share row 0


@dataclass(eq=False)
class Rows:
    """Rows of an operation's result, in a buffer that is not reused while this object exists."""

    buffer: Buffer
    width: int
    selected: bool  # whether there is one row per output row, instead of one per token

    def words(self, name: str) -> dict[str, int]:
        """Return the instruction words that locate these rows. `name` is "x" (input) or "out" (output)."""
        return {
            name: self.buffer.region.address,
            f"{name}_stride": self.buffer.stride,
            f"{name}_copy": self.buffer.copy,
        }


class Buffers:
    """The buffers of one program, in its arena, sized for the largest batch."""

    def __init__(self, arena: Arena, limits: Limits) -> None:
        self._arena = arena
        self._limits = limits
        self._free: dict[tuple[Form, int, int, bool], list[Buffer]] = defaultdict(list)
        # keyed by the id of the tensor, which is kept alive so that its id stays unique
        self._constants: dict[int, tuple[Region, Tensor]] = {}

    def take(self, form: Form, width: int, *, selected: bool = False, copies: bool = False) -> Rows:
        """Return rows in an unused buffer, allocating one if necessary."""
        limits = self._limits
        key = (form, width, limits.outputs if selected else limits.tokens, copies)
        buffer = self._free[key].pop() if self._free[key] else self._allocate(*key)
        rows = Rows(buffer, width, selected)
        weakref.finalize(rows, self._free[key].append, buffer)
        return rows

    def _allocate(self, form: Form, width: int, count: int, copies: bool) -> Buffer:
        check_multiple(f"A row of {width} columns", width, form.columns)
        stride = row_bytes(form, width)
        copy = -(-stride // COPY_ALIGNMENT) * COPY_ALIGNMENT if copies else 0
        size = max(count * stride, (self._limits.threads - 1) * copy + stride)
        return Buffer(self._arena.allocate(f"{form.name} rows of {width}", size), stride, copy)

    def partials(self, kv: LayerKV, heads: int) -> Region:
        """Return memory for the partial attention results of divided tiles. All layers share it."""
        limits = self._limits
        count = limits.slots * kv.kv_heads * limits.pieces * heads
        return self._arena.shared(f"pieces of {heads} heads", count * partial_bytes(kv.head_dim))

    def constant(self, values: Tensor) -> Region:
        """Copy a float32 tensor to a fixed address, once per tensor, and return its region."""
        if id(values) not in self._constants:
            region = self._arena.allocate("constant", values.nbytes)
            region.view(np.float32, *values.shape)[:] = values.numpy()
            self._constants[id(values)] = region, values
        return self._constants[id(values)][0]
