"""Operations that record: running model code on them once writes the program of every step.

A value between operations is an `Activation`: rows in a buffer, or the promise of rows that are written in whatever
form their first reader wants. So a norm quantizes what it hands to a quantized product, and model code need not know.
A buffer is used again as soon as model code has let go of the value in it, and its last readers with it.
Knows shapes and addresses. Refuses to know values: none exist while recording.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import Gate
from engine.cpu.attention import ATTENTION_KERNELS, record_bytes
from engine.cpu.kv_store import STORE_KERNELS, KVType, head_bytes
from engine.cpu.program import SEGMENT, Op, Program, float_bits
from engine.errors import UnsupportedModel
from engine.kv_cache import LayerKV
from engine.operations import Attention
from quant.cpu.activations import FORM_KERNELS, GROUP, SILU_PRODUCTS, Form, row_bytes
from quant.cpu.arena import Region
from quant.cpu.formats import PAIR
from quant.cpu.linear import CpuBackend, CpuLinear, Part
from quant.cpu.native import address_of
from quant.linear import QLinear

COPY_ALIGNMENT = 128  # bytes: two threads' copies share no cache line


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


@dataclass(eq=False)
class Activation:
    """A value of model code. `write` puts its rows down in a form, and `pick` only those that are wanted, where that is
    no more work; `picked_from` is what `select` picks rows of."""

    width: int
    selected: bool
    write: Callable[[Form], Rows]
    pick: Callable[[Form], Rows] | None = None
    picked_from: "Activation | None" = None
    added_to: bool = False  # its reader adds to rows that this may be made of: nobody reads on before all have written
    _written: dict[Form, Rows] = field(default_factory=dict)

    def rows(self, form: Form) -> Rows:
        if form not in self._written:
            self._written[form] = self.write(form)
        return self._written[form]


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Where a step leaves its logits, float32 [outputs, vocabulary], and the id of the largest in each row."""

    logits: Region
    vocabulary: int
    best: Region  # int64 [outputs]; -1 where there is no number


class CpuOperations:
    """Records one model into `program`."""

    def __init__(self, weights: CpuBackend, program: Program) -> None:
        self.weights = weights
        self._program = program
        self._free: dict[tuple[Form, int, int, bool], list[Buffer]] = defaultdict(list)
        self._constants: dict[int, tuple[Region, Tensor]] = {}  # by id, with the tensor that keeps the id taken

    def embed(self, batch: Batch, table: QLinear, scale: float = 1.0) -> Activation:
        _refuse("scaled embeddings", scale != 1.0)
        (part,) = _packed(table).parts
        _refuse("embeddings in an order of their own", part.order is not None)
        out = self._take(Form.FLOAT, table.inputs)
        self._program.append(
            Op.EMBED, kernel=part.row_kernel, weight=part.region.address, tile_bytes=part.tile_bytes,
            groups=part.groups, rows=part.rows, **out.words("out"),
        )  # fmt: skip
        return self._floats(out)

    def select(self, x: Activation, batch: Batch) -> Activation:
        def write(form: Form) -> Rows:
            return x.pick(form) if x.pick else self._rewrite(x.rows(Form.FLOAT), form, gather=True)

        return Activation(x.width, selected=True, write=write, picked_from=x)

    def norm(self, x: Activation, weight: Tensor, epsilon: float, add_to: Activation | None = None) -> Activation:
        _refuse("norms behind a layer", add_to is not None)
        vector = self._constant(weight)

        def write(form: Form) -> Rows:
            gather = x.picked_from is not None
            source = (x.picked_from or x).rows(Form.FLOAT)
            normed = itself()
            added_to = normed is not None and normed.added_to
            local = not (added_to or form is Form.FLOAT)
            out = self._take(form, x.width, selected=x.selected, copies=local)
            self._program.append(
                Op.NORM, local=local, selected=x.selected, gather=gather, form=form,
                kernel=address_of(FORM_KERNELS[form].scale_row), groups=x.width // GROUP,
                vector=vector.address, epsilon=float_bits(epsilon), **source.words("x"), **out.words("out"),
            )  # fmt: skip
            return out

        normed = Activation(x.width, x.selected, write)
        itself = weakref.ref(normed)  # a circle of references would keep its buffers taken
        return normed

    def linear(
        self, x: Activation, weight: QLinear, add_to: Activation | None = None, bias: Tensor | None = None
    ) -> Activation:
        _refuse("biases", bias is not None)
        packed = _packed(weight)
        # In place, where there is something to add to: nobody may read that from here on.
        out = add_to.rows(Form.FLOAT) if add_to else self._take(Form.FLOAT, weight.outputs, selected=x.selected)
        self._multiply(x, packed, out, add=add_to is not None)
        return self._floats(out)

    def logits(self, x: Activation, head: QLinear, softcap: float = 0.0) -> LogitRows:
        _refuse("capped logits", softcap != 0.0)
        packed = _packed(head)
        out = self._take(Form.FLOAT, head.outputs, selected=True)
        self._multiply(x, packed, out, add=False)
        outputs, segments = self._program.limits.outputs, -(-head.outputs // SEGMENT)
        largest = self._program.arena.take("largest logits", 8 * outputs * segments)
        self._program.append(
            Op.ARGMAX, selected=1, rows=head.outputs, x=out.buffer.region.address, x_stride=out.buffer.stride,
            out=largest.address,
        )  # fmt: skip
        best = self._program.arena.take("best logits", 8 * outputs)
        self._program.append(Op.PICK, selected=1, rows=head.outputs, x=largest.address, out=best.address)
        return LogitRows(out.buffer.region, head.outputs, best)

    def gated_mlp(
        self, x: Activation, gate_up: QLinear, down: QLinear, add_to: Activation | None = None, gate: Gate = Gate.SILU
    ) -> Activation:
        _refuse("this gate", gate is not Gate.SILU)
        packed, width = _packed(gate_up), gate_up.outputs // 2
        if width % GROUP:
            raise UnsupportedModel(f"An MLP of width {width}, not a multiple of {GROUP}, has no CPU kernel", _PLAIN)
        first, up = packed.part_of(0), packed.part_of(width)
        alike = packed.form(first) is packed.form(up) and first.order is up.order
        fits = width % PAIR == 0 and alike and (width - up.first) % PAIR == 0
        if fits and first.rows >= width and up.first + up.rows == gate_up.outputs:
            return self.linear(self._gated_product(x, packed, first, up), down, add_to)
        both = self.linear(x, gate_up).rows(Form.FLOAT)

        def write(form: Form) -> Rows:
            out = self._take(form, width, selected=x.selected)
            self._program.append(
                Op.GATE, selected=x.selected, form=form, kernel=address_of(SILU_PRODUCTS[form]),
                groups=width // GROUP, **both.words("x"), **out.words("out"),
            )  # fmt: skip
            return out

        return self.linear(self._product(width, x.selected, write), down, add_to)

    def _gated_product(self, x: Activation, gates: CpuLinear, gate: Part, up: Part) -> Activation:
        """Both products and theirs in one instruction, which hands over 32 columns as soon as it has them."""
        width, form = gates.outputs // 2, gates.form(gate)
        one, two, four, six = gate.tile_kernels(form)
        up_one, up_two, up_four, up_six = up.tile_kernels(form)

        def write(out_form: Form) -> Rows:
            source, out = self._rows_for(x, form, gate.order), self._take(out_form, width, selected=x.selected)
            self._program.append(
                Op.GATED, selected=x.selected, form=form, out_form=out_form, groups=gate.groups, rows=width,
                kernel=address_of(SILU_PRODUCTS[out_form]),
                one=one, two=two, four=four, six=six, weight=gate.address(0), tile_bytes=gate.tile_bytes,
                up_one=up_one, up_two=up_two, up_four=up_four, up_six=up_six,
                up=up.address(width), up_tile_bytes=up.tile_bytes,
                **source.words("x"), **out.words("out"),
            )  # fmt: skip
            return out

        return self._product(width, x.selected, write)

    def _product(self, width: int, selected: bool, write: Callable[[Form], Rows]) -> Activation:
        """Written by `write` in the forms that products come in, and from floats in others."""
        direct = Activation(width, selected, write)

        def rows(form: Form) -> Rows:
            if form in SILU_PRODUCTS:
                return direct.rows(form)
            return self._rewrite(direct.rows(Form.FLOAT), form, local=True)

        return Activation(width, selected, rows)

    def rope_and_store(self, qkv: Activation, batch: Batch, kv: LayerKV, attention: Attention) -> Activation:
        rows, heads, rotary = qkv.rows(Form.FLOAT), _heads(qkv, kv), attention.rotary
        _refuse("norms of heads", attention.norms is not None)
        if rotary is None or 2 * rotary.cos.shape[-1] != kv.head_dim:
            raise UnsupportedModel("Heads of which not all elements turn have no CPU kernel", _PLAIN)
        self._program.append(
            Op.ROPE_STORE, kernel=address_of(STORE_KERNELS[_kv_type(kv)]),
            neighbours=rotary.interleaved, scale=float_bits(attention.scale),
            cosine=self._constant(rotary.cos).address, sine=self._constant(rotary.sin).address,
            **rows.words("x"), **heads, **_cache_words(kv),
        )  # fmt: skip
        return self._floats(rows)

    def attend(self, q: Activation, batch: Batch, kv: LayerKV, attention: Attention) -> Activation:
        _refuse("capped scores", attention.softcap != 0.0)
        _refuse("windows", attention.window is not None)
        rows, heads, limits = q.rows(Form.FLOAT), _heads(q, kv), self._program.limits
        width = kv.kv_heads * heads["heads"] * kv.head_dim
        parts = self._parts(kv, heads["heads"])
        out = self._take(Form.FLOAT, width)
        words = {"parts": parts.address, "max_pieces": limits.pieces, **heads}
        kernels = ATTENTION_KERNELS[_kv_type(kv)]
        self._program.append(
            Op.ATTEND, scores=address_of(kernels.scores), soften=address_of(kernels.soften),
            gather_values=address_of(kernels.gather),
            **rows.words("x"), **out.words("out"), **words, **_cache_words(kv),
        )  # fmt: skip

        def write(form: Form, gather: bool = False) -> Rows:
            local = form is not Form.FLOAT
            merged = self._take(form, width, selected=gather, copies=local)
            self._program.append(
                Op.MERGE, local=local, selected=gather, gather=gather, form=form, groups=width // GROUP,
                kernel=address_of(FORM_KERNELS[form].write_row), **out.words("x"), **merged.words("out"), **words,
            )  # fmt: skip
            return merged

        return Activation(width, False, write, partial(write, gather=True))

    # -- pieces of instructions

    def _multiply(self, x: Activation, weight: CpuLinear, out: Rows, *, add: bool) -> None:
        x.added_to = x.added_to or add
        # All forms are written first: x may be made of what the first part's product is added to.
        readers = {weight.source(part): part for part in weight.parts}
        sources = {key: self._rows_for(x, weight.form(part), part.order) for key, part in readers.items()}
        for part in weight.parts:
            form = weight.form(part)
            place = {**out.words("out"), "out": out.buffer.region.address + 4 * part.first}
            source, (one, two, four, six) = sources[weight.source(part)], part.tile_kernels(form)
            self._program.append(
                Op.MATMUL, barrier=part is weight.parts[-1], selected=x.selected, form=form, add=add,
                one=one, two=two, four=four, six=six, weight=part.region.address, tile_bytes=part.tile_bytes,
                groups=part.groups, rows=part.rows, **source.words("x"), **place,
            )  # fmt: skip

    def _rows_for(self, x: Activation, form: Form, order: Region | None) -> Rows:
        """Rows of x in the form and the order of columns of a weight's part."""
        return x.rows(form) if order is None else self._rewrite(x.rows(Form.FLOAT), form, order=order)

    def _rewrite(
        self, source: Rows, form: Form, *, gather: bool = False, local: bool = False, order: Region | None = None
    ) -> Rows:
        selected = source.selected or gather
        out = self._take(form, source.width, selected=selected, copies=local)
        self._program.append(
            Op.WRITE, local=local, selected=selected, gather=gather, form=form,
            kernel=address_of(FORM_KERNELS[form].write_row), groups=source.width // GROUP,
            order=order.address if order else 0, **source.words("x"), **out.words("out"),
        )  # fmt: skip
        return out

    def _floats(self, rows: Rows) -> Activation:
        def write(form: Form) -> Rows:
            return rows if form is Form.FLOAT else self._rewrite(rows, form)

        return Activation(rows.width, rows.selected, write)

    # -- memory

    def _take(self, form: Form, width: int, *, selected: bool = False, copies: bool = False) -> Rows:
        """A buffer that nobody holds."""
        limits = self._program.limits
        key = (form, width, limits.outputs if selected else limits.tokens, copies)
        buffer = self._free[key].pop() if self._free[key] else self._allocate(*key)
        rows = Rows(buffer, width, selected)
        weakref.finalize(rows, self._free[key].append, buffer)
        return rows

    def _allocate(self, form: Form, width: int, count: int, copies: bool) -> Buffer:
        if width % form.columns:
            raise UnsupportedModel(
                f"Rows of {width} columns, not a multiple of {form.columns}, have no CPU kernel", _PLAIN
            )
        stride = row_bytes(form, width)
        copy = -(-stride // COPY_ALIGNMENT) * COPY_ALIGNMENT if copies else 0
        size = max(count * stride, (self._program.limits.threads - 1) * copy + stride)
        return Buffer(self._program.arena.take(f"{form.name} rows of {width}", size), stride, copy)

    def _parts(self, kv: LayerKV, heads: int) -> Region:
        """Records of the pieces of single tokens; every layer uses the same ones, one after another."""
        limits = self._program.limits
        records = limits.requests * kv.kv_heads * limits.pieces * heads
        return self._program.arena.shared(f"pieces of {heads} heads", records * record_bytes(kv.head_dim))

    def _constant(self, values: Tensor) -> Region:
        """A float32 tensor at a fixed address."""
        if id(values) not in self._constants:
            region = self._program.arena.take("constant", values.nbytes)
            region.view(np.float32, *values.shape)[:] = values.numpy()
            self._constants[id(values)] = region, values
        return self._constants[id(values)][0]


_PLAIN = "Use the plain kernels: --kernels reference."


def _refuse(what: str, asked: bool) -> None:
    if asked:
        raise UnsupportedModel(f"There is no CPU kernel for {what}", _PLAIN)


def _packed(weight: QLinear) -> CpuLinear:
    if not isinstance(weight, CpuLinear):
        raise TypeError(f"{type(weight).__name__} is not a layer of the CPU backend")
    return weight


def _heads(qkv: Activation, kv: LayerKV) -> dict[str, int]:
    """How the columns of a row of q, k and v divide into heads."""
    return {
        "kv_heads": kv.kv_heads,
        "heads": qkv.width // kv.head_dim // kv.kv_heads - 2,
        "head_dim": kv.head_dim,
    }


def _kv_type(kv: LayerKV) -> KVType:
    return KV_TYPES[kv.pool.dtype]


def _cache_words(kv: LayerKV) -> dict[str, int]:
    kv_type = _kv_type(kv)
    return {
        "cache": kv.pool.data_ptr(),
        "block_bytes": kv.pool.stride(0) * kv.pool.itemsize,
        "kv_type": kv_type,
        "head_bytes": head_bytes(kv_type, kv.head_dim),
    }


def check_head_dim(head_dim: int) -> None:
    """Raise UnsupportedModel for heads that the kernels cannot cut into vectors."""
    if head_dim % 32:
        raise UnsupportedModel(f"A head dimension of {head_dim}, not a multiple of 32, has no CPU kernel", _PLAIN)


KV_TYPES = {torch.float16: KVType.FLOAT16, torch.int8: KVType.INT8}  # by the type of the pool


def block_shape(dtype: torch.dtype, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """One layer of one block, in elements of the pool: each KV head as `engine.cpu.kv_store` lays it out."""
    check_head_dim(head_dim)
    return kv_heads, head_bytes(KV_TYPES[dtype], head_dim) // dtype.itemsize
