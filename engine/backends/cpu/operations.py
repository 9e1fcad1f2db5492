"""Operations that record a program: running the model code once on them writes the program that all steps use.

A value between operations is an `Activation`: rows in a buffer, or rows that are written later in the form that their
first reader needs. A norm can therefore write quantized rows for a quantized product, without changes to the model
code. A buffer is reused as soon as the model code has released its value and the last reader is recorded. No values
exist while recording: this module only handles shapes and addresses.
"""

import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.backends.cpu.attention import ATTENTION_KERNELS, UNLIMITED
from engine.backends.cpu.buffers import USE_REFERENCE, Activation, Buffers, Rows, check_multiple
from engine.backends.cpu.experts import PRODUCTS, ExpertRecorder, Routes
from engine.backends.cpu.instructions import SEGMENT, Op, float_bits, product_words
from engine.backends.cpu.kv_store import STORE_KERNELS, KVType, head_bytes
from engine.backends.cpu.program import Program
from engine.backends.cpu.recurrent import RecurrentRecorder
from engine.batch import Batch
from engine.errors import UnsupportedModel
from engine.kv.cache import LayerKV, LayerState
from engine.model_config import Gate, NormKind
from engine.operations import Attention, DeltaRule, ExpertMLP, GatedMLP, HeadNorms, Norm, Router, ShortConv
from quant.cpu.activations import FORM_KERNELS, GROUP, Form, add_scaled_row
from quant.cpu.arena import Region
from quant.cpu.ggml_formats import PAIR
from quant.cpu.linear import CpuBackend, CpuLinear, Part, cpu_layer
from quant.cpu.native import address_of
from quant.cpu.vector import LANES
from quant.linear import QLinear


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The logits of a step, float32 [outputs, vocabulary], and the id of the largest logit in each row."""

    logits: Region
    vocabulary: int
    best: Region  # int64 [outputs]; -1 if no logit is above -inf


class CpuOperations:
    """Implements the model's operations by recording them into `program`."""

    def __init__(self, weights: CpuBackend, program: Program) -> None:
        self.weights = weights
        self._program = program
        self._buffers = Buffers(program.arena, program.limits)
        # not a method, because the recorder would then be in a reference cycle that keeps the weights alive
        self._rewrite = partial(_rewrite, program, self._buffers)
        self._experts = ExpertRecorder(program, self._buffers, self._rewrite)
        self._recurrent = RecurrentRecorder(program, self._buffers)

    def embed(self, batch: Batch, table: QLinear, scale: float = 1.0) -> Activation:
        (part,) = cpu_layer(table).parts
        if part.order is not None:
            raise UnsupportedModel("Embeddings with permuted columns have no CPU kernel", USE_REFERENCE)
        out = self._buffers.take(Form.FLOAT, table.inputs)
        self._program.append(
            Op.EMBED, kernel=part.row_kernel, weight=part.region.address, tile_bytes=part.tile_bytes,
            groups=part.groups, rows=part.rows, scale=float_bits(scale), **out.words("out"),
        )  # fmt: skip
        return self._floats(out)

    def select(self, x: Activation, batch: Batch) -> Activation:
        def write(form: Form) -> Rows:
            return x.pick_rows(form) if x.pick_rows else self._rewrite(x.rows(Form.FLOAT), form, gather=True)

        return Activation(x.width, selected=True, write=write, selected_from=x)

    def selected(self, batch: Batch) -> Batch:
        return batch  # rows know whether they are selected

    def norm(self, x: Activation, norm: Norm, add_to: Activation | None = None) -> Activation:
        if add_to:
            given, out = x.rows(Form.FLOAT), add_to.rows(Form.FLOAT)
            words = {**given.words("x"), **out.words("out")}
            if x.width > len(norm.weight):  # each part of a row is a row of the instruction
                words |= dict.fromkeys(("x_stride", "out_stride"), 4 * len(norm.weight))
                words["each"] = x.width // len(norm.weight)
            self._normalize(norm, Form.FLOAT, add=1, selected=x.selected, **words)
            return self._floats(out)

        def write(form: Form) -> Rows:
            gather = x.selected_from is not None
            source = (x.selected_from or x).rows(Form.FLOAT)
            normed = itself()
            added_to = normed is not None and normed.added_to
            local = not (added_to or form is Form.FLOAT)
            out = self._buffers.take(form, x.width, selected=x.selected, copies=local)
            self._normalize(
                norm, form, local=local, selected=x.selected, gather=gather, **source.words("x"), **out.words("out")
            )
            return out

        normed = Activation(x.width, x.selected, write)
        itself = weakref.ref(normed)  # weak, because a reference cycle would keep the buffers alive
        return normed

    def linear(
        self,
        x: Activation,
        weight: QLinear,
        add_to: Activation | None = None,
        bias: Tensor | None = None,
        *,
        in_float32: bool = False,
    ) -> Activation:
        # A residual is added in place. Later operations must not read `add_to` again.
        out = add_to.rows(Form.FLOAT) if add_to else self._buffers.take(Form.FLOAT, weight.outputs, selected=x.selected)
        self._multiply(x, cpu_layer(weight), out, add=add_to is not None, bias=bias)
        return self._floats(out)

    def logits(self, x: Activation, head: QLinear, softcap: float = 0.0) -> LogitRows:
        out = self._buffers.take(Form.FLOAT, head.outputs, selected=True)
        self._multiply(x, cpu_layer(head), out, add=False)
        outputs, segments = self._program.limits.outputs, -(-head.outputs // SEGMENT)
        largest = self._program.arena.allocate("largest logits", 8 * outputs * segments)
        self._program.append(
            Op.ARGMAX_SEGMENTS, selected=1, rows=head.outputs, x=out.buffer.region.address, x_stride=out.buffer.stride,
            out=largest.address, softcap=float_bits(softcap),
        )  # fmt: skip
        best = self._program.arena.allocate("best logits", 8 * outputs)
        self._program.append(Op.ARGMAX_ROWS, selected=1, rows=head.outputs, x=largest.address, out=best.address)
        return LogitRows(out.buffer.region, head.outputs, best)

    def gated_mlp(
        self, x: Activation, mlp: GatedMLP, add_to: Activation | None = None, gate: Gate = Gate.SILU
    ) -> Activation:
        gate_up, down = mlp.gate_up, mlp.down
        packed, width, products = cpu_layer(gate_up), gate_up.outputs // 2, PRODUCTS[gate]
        check_multiple(f"An MLP of width {width}", width, GROUP)
        first, up = packed.part_of(0), packed.part_of(width)
        alike = packed.form(first) is packed.form(up) and first.order is up.order
        fits = width % PAIR == 0 and alike and (width - up.first) % PAIR == 0
        if fits and first.rows >= width and up.first + up.rows == gate_up.outputs:
            return self.linear(self._gated_product(x, packed, first, up, products), down, add_to)
        both = self.linear(x, gate_up)
        return self.linear(self._gate(both, both, 4 * width, width, gate), down, add_to)

    def gate_part(self, x: Activation, values: Activation, part: int, gate: Gate) -> Activation:
        check_multiple(f"A gate of width {x.width}", x.width, GROUP)
        return self._gate(x, values, 4 * x.width * part, x.width, gate)

    def _gate(self, gates: Activation, values: Activation, start: int, width: int, gate: Gate) -> Activation:
        """Record the gated product of the first `width` columns of `gates` and those of `values` from byte `start`
        on.
        """
        x, up, products = gates.rows(Form.FLOAT), values.rows(Form.FLOAT), PRODUCTS[gate]

        def write(form: Form) -> Rows:
            out = self._buffers.take(form, width, selected=gates.selected)
            self._program.append(
                Op.GATE, selected=gates.selected, form=form, kernel=address_of(products[form]),
                groups=width // GROUP, up=up.buffer.region.address + start, up_stride=up.buffer.stride,
                **x.words("x"), **out.words("out"),
            )  # fmt: skip
            return out

        return self._product(width, gates.selected, products, write)

    def route(self, x: Activation, router: Router) -> Routes:
        return self._experts.route(self.linear(x, router.weight, bias=router.bias).rows(Form.FLOAT), router)

    def experts(
        self, x: Activation, routes: Routes, mlp: ExpertMLP, add_to: Activation | None = None, gate: Gate = Gate.SILU
    ) -> Activation:
        shared = self.gated_mlp(x, mlp.shared, gate=gate).rows(Form.FLOAT) if mlp.shared else None
        rows = self._experts.multiply(x, routes, mlp, gate)
        return self._floats(self._experts.combine(rows, routes, shared, add_to.rows(Form.FLOAT) if add_to else None))

    def _gated_product(
        self, x: Activation, gates: CpuLinear, gate: Part, up: Part, products: dict[Form, Any]
    ) -> Activation:
        """Record one instruction that computes both products and the gate. It writes each group of 32 columns when the
        group is complete.
        """
        width, form = gates.outputs // 2, gates.form(gate)

        def write(out_form: Form) -> Rows:
            source = self._rows_for(x, form, gate.order)
            out = self._buffers.take(out_form, width, selected=x.selected)
            self._program.append(
                Op.GATED, selected=x.selected, form=form, out_form=out_form, groups=gate.groups, rows=width,
                kernel=address_of(products[out_form]),
                weight=gate.address(0), up=up.address(width),
                **product_words(gate, form), **product_words(up, form, "up_"), **source.words("x"), **out.words("out"),
            )  # fmt: skip
            return out

        return self._product(width, x.selected, products, write)

    def _product(
        self, width: int, selected: bool, products: Container[Form], write: Callable[[Form], Rows]
    ) -> Activation:
        """Return a value that `write` can write directly in the forms in `products`. Other forms are converted from
        floats.
        """
        direct = Activation(width, selected, write)

        def rows(form: Form) -> Rows:
            if form in products:
                return direct.rows(form)
            return self._rewrite(direct.rows(Form.FLOAT), form, local=True)

        return Activation(width, selected, rows)

    def rope_and_store(self, qkv: Activation, batch: Batch, kv: LayerKV, attention: Attention) -> Activation:
        rows, heads, rotary = qkv.rows(Form.FLOAT), _heads(qkv, kv, attention), attention.rotary
        angles, norms = {}, {}
        if rotary:
            cosine, sine = (self._buffers.constant(table).address for table in (rotary.cos, rotary.sin))
            rotary_dim = 2 * rotary.cos.shape[-1]
            angles = {"rotary_dim": rotary_dim, "interleaved": rotary.interleaved, "cosine": cosine, "sine": sine}
            angles["distance"] = 0 if rotary.interleaved else rotary.distance
        if attention.norms:
            norms = self._head_norms(rows, heads, attention.norms)
        self._program.append(
            Op.ROPE_STORE, selected=qkv.selected, kernel=address_of(STORE_KERNELS[_kv_type(kv)]),
            scale=float_bits(attention.scale),
            **angles, **norms, **rows.words("x"), **heads, **_cache_words(kv),
        )  # fmt: skip
        return self._floats(rows)

    def _head_norms(self, rows: Rows, heads: dict[str, int], norms: HeadNorms) -> dict[str, int]:
        """Return the instruction words for normalizing each head before rotation.

        A norm over all heads together is recorded as a separate instruction and needs no words.
        """
        q, width = norms.q, norms.q.weight.shape[-1]
        if width == heads["head_dim"]:
            check_multiple(f"A normalized head of {width} elements", width, GROUP)
            named = {"q_norm": q, "k_norm": norms.k, "v_norm": norms.v}
            return {
                **{name: self._buffers.constant(it.weight).address for name, it in named.items() if it},
                "norm_stride": 4 * width * (q.weight.dim() == 2),
                "centered": q.kind is NormKind.LAYER,
                "epsilon": float_bits(q.epsilon),
            }
        for norm, first in ((q, 0), (norms.k, width)):
            words = {**rows.words("x"), **rows.words("out")}
            words["x"] = words["out"] = rows.buffer.region.address + 4 * first
            self._normalize(norm, Form.FLOAT, barrier=norm is norms.k, **words)
        return {}

    def attend(self, q: Activation, batch: Batch, kv: LayerKV, attention: Attention) -> Activation:
        rows, heads, limits = q.rows(Form.FLOAT), _heads(q, kv, attention), self._program.limits
        width = kv.kv_heads * heads["heads"] * kv.head_dim
        partials = self._buffers.partials(kv, heads["heads"])
        out = self._buffers.take(Form.FLOAT, width, selected=q.selected)
        window = min(attention.window or UNLIMITED, UNLIMITED)
        sinks = 0 if attention.sinks is None else self._buffers.constant(attention.sinks).address
        words = {"partials": partials.address, "max_pieces": limits.pieces, "window": window, "sinks": sinks, **heads}
        kernels = ATTENTION_KERNELS[_kv_type(kv)]
        self._program.append(
            Op.ATTEND, selected=q.selected, scores=address_of(kernels.scores), softmax=address_of(kernels.softmax),
            weighted_sum=address_of(kernels.weighted_sum), softcap=float_bits(attention.softcap),
            **rows.words("x"), **out.words("out"), **words, **_cache_words(kv),
        )  # fmt: skip

        def write(form: Form, gather: bool = False) -> Rows:
            local = form is not Form.FLOAT
            selected = gather or q.selected
            merged = self._buffers.take(form, width, selected=selected, copies=local)
            self._program.append(
                Op.MERGE, local=local, selected=selected, gather=gather, form=form, groups=width // GROUP,
                kernel=address_of(FORM_KERNELS[form].write_row), **out.words("x"), **merged.words("out"), **words,
            )  # fmt: skip
            return merged

        return Activation(width, q.selected, write, None if q.selected else partial(write, gather=True))

    def convolve(self, x: Activation, batch: Batch, state: LayerState, conv: ShortConv) -> Activation:
        return self._floats(self._recurrent.convolve(x.rows(Form.FLOAT), state, conv.weight, plain=False))

    def delta_rule(self, x: Activation, batch: Batch, state: LayerState, delta: DeltaRule) -> Activation:
        return self._floats(self._recurrent.delta_rule(x.rows(Form.FLOAT), state, delta))

    def scale(self, x: Activation, gate: Activation) -> Activation:
        rows, gates = x.rows(Form.FLOAT), gate.rows(Form.FLOAT)
        out = self._buffers.take(Form.FLOAT, x.width, selected=x.selected)
        self._program.append(
            Op.SCALE, selected=x.selected, groups=x.width // GROUP, gate=gates.buffer.region.address,
            gate_stride=gates.buffer.stride, **rows.words("x"), **out.words("out"),
        )  # fmt: skip
        return self._floats(out)

    # -- parts of instructions

    def _normalize(self, norm: Norm, form: Form, *, add: int = 0, **words: int) -> None:
        """Record a norm of rows that are as wide as its weight. The result is written in `form`, or added to existing
        floats.
        """
        width, kernels, op = len(norm.weight), FORM_KERNELS[form], Op.NORM
        check_multiple(f"A norm of {width} elements", width, GROUP)
        kernel = add_scaled_row if add else kernels.scale_row
        if norm.kind is NormKind.LAYER:
            op, kernel, words["add"] = Op.LAYER_NORM, kernels.write_row, add
            words["bias"] = 0 if norm.bias is None else self._buffers.constant(norm.bias).address
        self._program.append(
            op, kernel=address_of(kernel), form=form, groups=width // GROUP,
            scale=float_bits(norm.sum_scale if add else 1.0), vector=self._buffers.constant(norm.weight).address,
            epsilon=float_bits(norm.epsilon), **words,
        )  # fmt: skip

    def _multiply(self, x: Activation, weight: CpuLinear, out: Rows, *, add: bool, bias: Tensor | None = None) -> None:
        x.added_to = x.added_to or add
        biases = 0 if bias is None else self._buffers.constant(bias).address
        # Write all forms first: x may depend on the buffer that the product of the first part is added to.
        readers = {weight.source(part): part for part in weight.parts}
        sources = {key: self._rows_for(x, weight.form(part), part.order) for key, part in readers.items()}
        for part in weight.parts:
            form = weight.form(part)
            target = {**out.words("out"), "out": out.buffer.region.address + 4 * part.first}
            source = sources[weight.source(part)]
            self._program.append(
                Op.MATMUL, barrier=part is weight.parts[-1], selected=x.selected, form=form, add=add,
                weight=part.region.address, groups=part.groups, rows=part.rows, bias=biases and biases + 4 * part.first,
                **product_words(part, form), **source.words("x"), **target,
            )  # fmt: skip

    def _rows_for(self, x: Activation, form: Form, order: Region | None) -> Rows:
        """Return the rows of x in the form and column order that a part of a weight needs."""
        return x.rows(form) if order is None else self._rewrite(x.rows(Form.FLOAT), form, order=order)

    def _floats(self, rows: Rows) -> Activation:
        def write(form: Form) -> Rows:
            return rows if form is Form.FLOAT else self._rewrite(rows, form)

        return Activation(rows.width, rows.selected, write)


def _rewrite(
    program: Program,
    buffers: Buffers,
    source: Rows,
    form: Form,
    *,
    gather: bool = False,
    local: bool = False,
    order: Region | None = None,
) -> Rows:
    """Record an instruction that writes rows of floats in another form, and return the written rows."""
    selected = source.selected or gather
    out = buffers.take(form, source.width, selected=selected, copies=local, each=source.each)
    program.append(
        Op.WRITE, local=local, selected=selected, gather=gather, each=source.each, form=form,
        kernel=address_of(FORM_KERNELS[form].write_row), groups=source.width // GROUP,
        order=order.address if order else 0, **source.words("x"), **out.words("out"),
    )  # fmt: skip
    return out


def _heads(qkv: Activation, kv: LayerKV, attention: Attention) -> dict[str, int]:
    """Return the instruction words that describe how the columns of a qkv row divide into heads."""
    return {
        "kv_heads": kv.kv_heads,
        "heads": kv.query_heads(qkv.width, queries_only=attention.shared) // kv.kv_heads,
        "head_dim": kv.head_dim,
        "queries_only": attention.shared,
    }


def _kv_type(kv: LayerKV) -> KVType:
    return KV_TYPES[kv.pool.dtype]


def _cache_words(kv: LayerKV) -> dict[str, int]:
    kv_type = _kv_type(kv)
    return {
        "group": kv.group,
        "cache": kv.pool.data_ptr(),
        "block_bytes": kv.pool.stride(0) * kv.pool.itemsize,
        "kv_type": kv_type,
        "head_bytes": head_bytes(kv_type, kv.head_dim),
    }


KV_TYPES = {torch.float16: KVType.FLOAT16, torch.int8: KVType.INT8}  # keyed by the dtype of the pool


def block_shape(dtype: torch.dtype, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Return the shape of one layer in one block, in elements of the pool, with the layout of `kv_store`.

    Raises UnsupportedModel if a head is not a whole number of vectors.
    """
    check_multiple(f"A head dimension of {head_dim}", head_dim, LANES)
    return kv_heads, head_bytes(KV_TYPES[dtype], head_dim) // dtype.itemsize
