"""Buffers: memory for what a program's instructions hand to each other, and for what all of them read.

A buffer is used again as soon as nobody holds the rows in it. Knows shapes and addresses. Refuses to know instructions.
"""

import weakref
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.backends.cpu.program import Limits
from engine.backends.cpu.records import record_bytes
from engine.errors import UnsupportedModel
from engine.kv.cache import LayerKV
from quant.cpu.activations import Form, row_bytes
from quant.cpu.arena import Arena, Region

PLAIN_KERNELS = "Use the plain kernels: --kernels reference."
COPY_ALIGNMENT = 128  # bytes: two threads' copies share no cache line


def check_multiple(what: str, width: int, of: int) -> None:
    """Raise UnsupportedModel for a width that kernels cannot cut into pieces."""
    if width % of:
        message = f"{what}, not a multiple of {of}, has no CPU kernel"
        raise UnsupportedModel(message, PLAIN_KERNELS)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory for rows of one width and form."""

    region: Region
    stride: int  # bytes
    copy: int  # bytes between the threads' own copies of row 0; 0: there are none


@dataclass(eq=False)
class Rows:
    """What an operation writes into a buffer. While it lives, the buffer is not given to anyone else."""

    buffer: Buffer
    width: int
    selected: bool  # a row for each wanted logit, not for each token

    def words(self, name: str) -> dict[str, int]:
        """The words of an instruction that say where these rows are; `name` is x or out."""
        return {
            name: self.buffer.region.address,
            f"{name}_stride": self.buffer.stride,
            f"{name}_copy": self.buffer.copy,
        }


class Buffers:
    """Those of one program, in its arena, for the largest batch there can be."""

    def __init__(self, arena: Arena, limits: Limits) -> None:
        self._arena = arena
        self._limits = limits
        self._free: dict[tuple[Form, int, int, bool], list[Buffer]] = defaultdict(list)
        self._constants: dict[int, tuple[Region, Tensor]] = {}  # by id, with the tensor that keeps the id taken

    def take(self, form: Form, width: int, *, selected: bool = False, copies: bool = False) -> Rows:
        """A buffer that nobody holds."""
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

    def parts(self, kv: LayerKV, heads: int) -> Region:
        """Records of the pieces of single tokens; every layer uses the same ones, one after another."""
        limits = self._limits
        records = limits.requests * kv.kv_heads * limits.pieces * heads
        return self._arena.shared(f"pieces of {heads} heads", records * record_bytes(kv.head_dim))

    def constant(self, values: Tensor) -> Region:
        """A float32 tensor at a fixed address."""
        if id(values) not in self._constants:
            region = self._arena.allocate("constant", values.nbytes)
            region.view(np.float32, *values.shape)[:] = values.numpy()
            self._constants[id(values)] = region, values
        return self._constants[id(values)][0]
