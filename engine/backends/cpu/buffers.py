"""Buffers of one program: for constants, and for the values that instructions pass to each other.

A buffer is reused as soon as no Rows object refers to it.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from engine.backends.cpu.instructions import BLOCK_WORDS, Limits, most_blocks
from engine.backends.cpu.partials import partial_bytes
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
    each: int = 0  # number of rows per token or output row; 0: one

    def words(self, name: str) -> dict[str, int]:
        """Return the instruction words that locate these rows. `name` is "x" (input) or "out" (output)."""
        return {
            name: self.buffer.region.address,
            f"{name}_stride": self.buffer.stride,
            f"{name}_copy": self.buffer.copy,
        }


@dataclass(frozen=True, slots=True)
class RouteBuffers:
    """The experts of all tokens. Instruction words of the same names describe the contents."""

    ids: Region
    weights: Region
    row_of: Region
    token_of: Region
    blocks: Region

    def words(self) -> dict[str, int]:
        return {
            "ids": self.ids.address,
            "weights": self.weights.address,
            "row_of": self.row_of.address,
            "token_of": self.token_of.address,
            "blocks": self.blocks.address,
        }


@dataclass(eq=False)
class Activation:
    """A value in the model code.

    `write` records instructions that write its rows in a given form. `pick_rows` does the same for output rows only, if
    that saves work. `selected_from` is the value that `select` took rows from.
    """

    width: int
    selected: bool
    write: Callable[[Form], Rows]
    pick_rows: Callable[[Form], Rows] | None = None
    selected_from: "Activation | None" = None
    # Whether the reader of this value adds its result to rows from which this value may be computed. All threads must
    # then finish writing the value before any thread reads it.
    added_to: bool = False
    _written: dict[Form, Rows] = field(default_factory=dict)

    def rows(self, form: Form) -> Rows:
        if form not in self._written:
            self._written[form] = self.write(form)
        return self._written[form]


class Buffers:
    """The buffers of one program, in its arena, sized for the largest batch."""

    def __init__(self, arena: Arena, limits: Limits) -> None:
        self._arena = arena
        self._limits = limits
        self._free: dict[tuple[Form, int, int, bool], list[Buffer]] = defaultdict(list)
        self._routes: dict[tuple[int, int], RouteBuffers] = {}
        # keyed by the id of the tensor, which is kept alive so that its id stays unique
        self._constants: dict[int, tuple[Region, Tensor]] = {}

    def take(self, form: Form, width: int, *, selected: bool = False, copies: bool = False, each: int = 0) -> Rows:
        """Return rows in an unused buffer, allocating one if necessary."""
        count = self._limits.outputs if selected else self._limits.tokens
        key = (form, width, count * max(each, 1), copies)
        buffer = self._free[key].pop() if self._free[key] else self._allocate(*key)
        rows = Rows(buffer, width, selected, each)
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
        name = f"pieces of {kv.kv_heads} x {heads} heads of {kv.head_dim}"
        return self._arena.shared(name, count * partial_bytes(kv.head_dim))

    def routes(self, experts: int, choices: int) -> "RouteBuffers":
        """Return the memory of a layer's routes. All layers with the same numbers share it."""
        if (experts, choices) not in self._routes:
            tokens = max(self._limits.tokens, self._limits.outputs)
            rows = tokens * choices
            ids, row_of, token_of = (self._arena.allocate(name, 8 * rows) for name in ("ids", "rows_of", "tokens"))
            weights = self._arena.allocate("expert weights", 4 * (rows + tokens))
            blocks = self._arena.allocate("blocks", 8 * (1 + BLOCK_WORDS * most_blocks(rows, experts)))
            self._routes[experts, choices] = RouteBuffers(ids, weights, row_of, token_of, blocks)
        return self._routes[experts, choices]

    def floats(self, *values: float) -> Region:
        """Return an array of float32 constants."""
        region = self._arena.allocate("constant", 4 * len(values))
        region.view(np.float32, len(values))[:] = values
        return region

    def addresses(self, values: Sequence[int]) -> Region:
        """Return a table of addresses, int64."""
        region = self._arena.allocate("addresses", 8 * len(values))
        region.view(np.int64, len(values))[:] = values
        return region

    def constant(self, values: Tensor) -> Region:
        """Copy a float32 tensor to a fixed address, once per tensor, and return its region."""
        if id(values) not in self._constants:
            region = self._arena.allocate("constant", values.nbytes)
            region.view(np.float32, *values.shape)[:] = values.numpy()
            self._constants[id(values)] = region, values
        return self._constants[id(values)][0]
