"""Record the instructions of a mixture of experts.

The sequence is ROUTE, SORT_ROUTES, GATHER_ROWS, EXPERT_GATED, EXPERT_MATMUL, COMBINE (see `expert_units`). A step reads
the weights of the chosen experts only. If their columns are permuted (act-order), ORDER_ROWS permutes the input rows of
each expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.backends.cpu.buffers import USE_REFERENCE, Activation, Buffers, RouteBuffers, Rows
from engine.backends.cpu.instructions import Op, product_words
from engine.backends.cpu.program import Program
from engine.errors import UnsupportedModel
from engine.model_config import Gate, Score
from engine.operations import ExpertMLP, Router
from quant.cpu.activations import CLAMPED_PRODUCTS, GELU_PRODUCTS, GROUP, SILU_PRODUCTS, Form
from quant.cpu.linear import CpuLinear, Part, cpu_layer
from quant.cpu.native import address_of

PRODUCTS = {Gate.SILU: SILU_PRODUCTS, Gate.GELU: GELU_PRODUCTS, Gate.CLAMPED: CLAMPED_PRODUCTS}


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of every row, in buffers that the next layer overwrites."""

    buffers: RouteBuffers
    experts: int
    choices: int

    def words(self, *names: str) -> dict[str, int]:
        """Return the instruction words with these names."""
        every = {"experts": self.experts, "choices": self.choices, **self.buffers.words()}
        return {name: every[name] for name in names}


@dataclass(frozen=True, slots=True)
class StackedPart:
    """The same part of one weight of all experts. All have the layout of the first one."""

    part: Part
    table: int  # address of the experts' addresses, int64 [experts]
    orders: int  # address of the addresses of their column orders, int64 [experts]; 0: columns are in order

    @staticmethod
    def of(layers: Sequence[CpuLinear], row: int, buffers: Buffers) -> "StackedPart":
        """Stack the parts that start at output `row`. Raises UnsupportedModel if the experts differ."""
        parts = [layer.part_of(row) for layer in layers]
        if len({(it.layout, it.first, it.rows, it.tile_bytes) for it in parts}) > 1:
            raise UnsupportedModel("Experts with different types of weights have no CPU kernel", USE_REFERENCE)
        orders = [it.order.address for it in parts if it.order]
        if len(orders) not in (0, len(parts)):
            raise UnsupportedModel("Experts of which some have permuted columns have no CPU kernel", USE_REFERENCE)
        return StackedPart(
            parts[0],
            buffers.addresses([it.address(row) for it in parts]).address,
            buffers.addresses(orders).address if orders else 0,
        )


class ExpertRecorder:
    """Records the instructions of experts into `program`."""

    def __init__(self, program: Program, buffers: Buffers, rewrite: Callable[[Rows, Form], Rows]) -> None:
        """Store the program and its buffers. `rewrite` records writing float rows in another form."""
        self._program = program
        self._buffers = buffers
        self._rewrite = rewrite

    def route(self, logits: Rows, router: Router) -> Routes:
        """Record the choice of experts. `logits` are the float rows that the router returned."""
        routing, bias = router.routing, router.choice_bias
        routes = Routes(self._buffers.routes(routing.experts, routing.active), routing.experts, routing.active)
        self._program.append(
            Op.ROUTE, selected=logits.selected, sigmoid=routing.score is Score.SIGMOID, normalized=routing.normalized,
            expert_groups=routing.groups, active_groups=routing.active_groups, gates_shared=router.gates_shared,
            settings=self._buffers.floats(routing.epsilon, routing.scale).address,
            choice_bias=0 if bias is None else self._constant(bias),
            expert_scale=0 if router.scale is None else self._constant(router.scale), **logits.words("x"),
            **routes.words("experts", "choices", "ids", "weights"),
        )  # fmt: skip
        sorted_words = routes.words("experts", "choices", "ids", "row_of", "token_of", "blocks")
        self._program.append(Op.SORT_ROUTES, selected=logits.selected, **sorted_words)
        return routes

    def multiply(self, x: Activation, routes: Routes, mlp: ExpertMLP, gate: Gate) -> Rows:
        """Record the products of all chosen experts. Returns float rows in the order of experts."""
        downs = [cpu_layer(it.down) for it in mlp.experts]
        down = StackedPart.of(downs, 0, self._buffers)
        form = downs[0].form(down.part)
        wanted = Form.FLOAT if down.orders else form
        hidden = self._gated(x, routes, mlp, wanted, gate)
        if down.orders:
            hidden = self._in_form(self._ordered(hidden, routes, down.orders), form)
        out = self._take(Form.FLOAT, downs[0].outputs, x.selected, routes)
        self._program.append(
            Op.EXPERT_MATMUL, selected=x.selected, each=routes.choices, form=form,
            weight=down.table, groups=down.part.groups, rows=down.part.rows, **product_words(down.part, form),
            bias=self._constant(mlp.biases.down) if mlp.biases else 0,
            **hidden.words("x"), **out.words("out"), **routes.words("experts", "blocks"),
        )  # fmt: skip
        return out

    def combine(self, rows: Rows, routes: Routes, shared: Rows | None, add_to: Rows | None) -> Rows:
        """Record the sum of each token's rows and of its shared row, added to `add_to` if given."""
        out = add_to or self._buffers.take(Form.FLOAT, rows.width, selected=rows.selected)
        self._program.append(
            Op.COMBINE, selected=rows.selected, add=add_to is not None, groups=rows.width // GROUP,
            shared=shared.buffer.region.address if shared else 0, shared_stride=shared.buffer.stride if shared else 0,
            **rows.words("x"), **out.words("out"), **routes.words("choices", "weights", "row_of"),
        )  # fmt: skip
        return out

    def _constant(self, values: Tensor) -> int:
        return self._buffers.constant(values).address

    def _gated(self, x: Activation, routes: Routes, mlp: ExpertMLP, out_form: Form, gate: Gate) -> Rows:
        """Record gate and up of all chosen experts, and their product in `out_form`."""
        layers = [cpu_layer(it.gate_up) for it in mlp.experts]
        width, products = layers[0].outputs // 2, PRODUCTS[gate]
        first, up = (StackedPart.of(layers, row, self._buffers) for row in (0, width))
        form = _common_form(layers[0], first.part, up.part)
        if any(it.source(it.part_of(0))[1] != it.source(it.part_of(width))[1] for it in layers):
            raise UnsupportedModel("Experts with gate and up in different orders have no CPU kernel", USE_REFERENCE)
        if first.orders:
            rows, single = self._in_form(self._ordered(x.rows(Form.FLOAT), routes, first.orders), form), {}
        else:
            of_tokens = x.rows(form)
            rows = self._gather(of_tokens, form, routes)
            single = {"single": of_tokens.buffer.region.address, "x_copy": of_tokens.buffer.copy}
        direct = out_form if out_form in products else Form.FLOAT
        out = self._take(direct, width, x.selected, routes)
        self._program.append(
            Op.EXPERT_GATED, selected=x.selected, each=routes.choices, form=form, out_form=direct,
            groups=first.part.groups, rows=width, kernel=address_of(products[direct]),
            weight=first.table, up=up.table, bias=self._constant(mlp.biases.gate_up) if mlp.biases else 0,
            **product_words(first.part, form), **product_words(up.part, form, "up_"),
            **{**rows.words("x"), **single}, **out.words("out"), **routes.words("experts", "blocks"),
        )  # fmt: skip
        return out if direct is out_form else self._rewrite(out, out_form)

    def _in_form(self, rows: Rows, form: Form) -> Rows:
        return rows if form is Form.FLOAT else self._rewrite(rows, form)

    def _ordered(self, rows: Rows, routes: Routes, orders: int) -> Rows:
        """Record copying rows, one per token or per choice, in the column orders of their experts."""
        out = self._take(Form.FLOAT, rows.width, rows.selected, routes)
        source = {} if rows.each else routes.words("token_of")
        self._program.append(
            Op.ORDER_ROWS, selected=rows.selected, each=routes.choices, groups=rows.width // GROUP, orders=orders,
            **source, **rows.words("x"), **out.words("out"), **routes.words("experts", "blocks"),
        )  # fmt: skip
        return out

    def _gather(self, rows: Rows, form: Form, routes: Routes) -> Rows:
        """Record copying the rows of tokens into the order of their experts."""
        gathered = self._take(form, rows.width, rows.selected, routes)
        source = {"x": rows.buffer.region.address, "x_stride": rows.buffer.stride}
        self._program.append(
            Op.GATHER_ROWS, selected=rows.selected, each=routes.choices, words=rows.buffer.stride // 4,
            **routes.words("token_of"), **source, **gathered.words("out"),
        )  # fmt: skip
        return gathered

    def _take(self, form: Form, width: int, selected: bool, routes: Routes) -> Rows:
        return self._buffers.take(form, width, selected=selected, each=routes.choices)


def _common_form(layer: CpuLinear, gate: Part, up: Part) -> Form:
    """Return the form of the rows that both gate and up read."""
    forms = {layer.form(gate), layer.form(up)}
    if len(forms) == 1:
        return forms.pop()
    if Form.FLOAT in forms:
        raise UnsupportedModel("Experts with gate and up of different types have no CPU kernel", USE_REFERENCE)
    return Form.BITS_14  # all integer weights can be multiplied by it
