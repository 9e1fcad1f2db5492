"""Mixtures of experts in a step, against the reference operations: choices, weights, and bits that do not depend on the
batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.cpu.buffers import Activation
from engine.backends.cpu.operations import CpuOperations
from engine.backends.reference import ReferenceOperations
from engine.batch import Batch
from engine.errors import UnsupportedModel
from engine.kv.cache import KVCache
from engine.model_config import Gate, Routing, Score
from engine.operations import ExpertBiases, ExpertMLP, GatedMLP, Operations, Router
from quant.cpu.activations import Form
from quant.cpu.linear import cpu_layer
from quant.tensor import GroupedTensor, QTensor
from tests.engine.backends.cpu.recorded import compute, plain, record
from tests.engine.backends.cpu.test_operations import ROWS, batch_of, every_row, normal, rows
from tests.quant.cpu.random_weights import random_weight

PLAIN = Routing(8, 3)
ROUTINGS = {
    "softmax": PLAIN,
    "not normalized": replace(PLAIN, normalized=False, scale=2.5),
    "sigmoid": replace(PLAIN, score=Score.SIGMOID, epsilon=1e-3, scale=0.5),
    "groups": Routing(24, 4, Score.SIGMOID, groups=4, active_groups=2),
    "groups of one": Routing(6, 2, groups=6, active_groups=3),
    "one of many": Routing(33, 1),
    "all": Routing(5, 5, normalized=False),
}
FLOATS = ("F32", "F32", "F32")
LOGIT_BIAS = normal(64, seed=23)
EXPERT_SCALE = normal(64, seed=24)

pytestmark = pytest.mark.usefixtures("every_layout")


@dataclass(frozen=True)
class Mixture:
    """Random experts over rows of random numbers."""

    routing: Routing
    types: Sequence[str] = FLOATS  # types of gate, up, and down
    columns: int = 96
    hidden: int = 64  # width of an expert
    shared: int = 0  # width of the shared MLP; 0: none
    gated: bool = False  # whether the router scales the output of the shared MLP
    bias: Tensor | None = None
    biased: bool = False  # whether the products of experts and the logits have biases
    scaled: bool = False  # whether the weights of experts have factors

    @property
    def x(self) -> Tensor:
        return 3 * normal(ROWS, self.columns)

    def make(self, ops: Operations) -> ExpertMLP:
        count = self.routing.experts
        router = plain(normal(count + self.gated, self.columns, seed=15) / self.columns**0.5)
        return ExpertMLP(
            Router(
                self.routing,
                ops.weights.linear([router]),
                self.bias,
                LOGIT_BIAS[:count] if self.biased else None,
                EXPERT_SCALE[:count] if self.scaled else None,
            ),
            tuple(self._mlp(ops, number, self.hidden) for number in range(count)),
            self._mlp(ops, count, self.shared) if self.shared else None,
            expert_biases(count, self.hidden, self.columns) if self.biased else None,
        )

    def _mlp(self, ops: Operations, number: int, width: int) -> GatedMLP:
        gate, up = (weight(self.types[index], width, self.columns, 3 * number + index) for index in (0, 1))
        down = weight(self.types[2], self.columns, width, 3 * number + 2)
        return GatedMLP(ops.weights.linear([gate, up]), ops.weights.linear([down]))

    def apply(self, ops: Operations, x: Any, add_to: Any, gate: Gate = Gate.SILU) -> Any:
        mlp = self.make(ops)
        return ops.experts(x, ops.route(x, mlp.router), mlp, add_to, gate)

    def expected(self, add_to: Tensor | None, gate: Gate = Gate.SILU) -> Tensor:
        found: Tensor = self.apply(ReferenceOperations(keep_dequantized=False), self.x, add_to, gate)
        return found


@cache
def expert_biases(experts: int, hidden: int, columns: int) -> ExpertBiases:
    """Return random biases, which live as long as the programs that read them."""
    return ExpertBiases(2 * normal(experts, 2 * hidden, seed=21), normal(experts, columns, seed=22))


def weight(name: str, outputs: int, inputs: int, seed: int) -> QTensor:
    if name == "F32":
        return plain(normal(outputs, inputs, seed=seed) / inputs**0.5)
    made = random_weight(name, outputs, inputs, np.random.default_rng(seed))
    if isinstance(made, GroupedTensor) and made.order is not None:  # each expert has its own order of columns
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed // 3)).int()
        made = replace(made, order=order)
    return made


def check(
    cpu_kernels: Path, mixture: Mixture, error: float = 2e-5, form: Form = Form.BITS_14, gate: Gate = Gate.SILU
) -> None:
    """Compare the CPU kernels with the reference. `error` is the limit relative to the largest output."""
    y = normal(ROWS, mixture.columns, seed=9)

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Any:
        return mixture.apply(ops, rows(ops, batch, mixture.x), rows(ops, batch, y), gate)

    out, wanted = every_row(record(cpu_kernels, forward, form=form)), mixture.expected(y, gate)
    torch.testing.assert_close(out, wanted, rtol=0, atol=error * float((wanted - y).abs().max()))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_experts_equal_the_reference(cpu_kernels: Path, name: str, biased: bool) -> None:
    routing = ROUTINGS[name]
    check(cpu_kernels, Mixture(routing, bias=normal(routing.experts, seed=3) / 4 if biased else None))


def test_weights_of_experts_are_scaled(cpu_kernels: Path) -> None:
    check(cpu_kernels, Mixture(PLAIN, shared=128, scaled=True))


@pytest.mark.parametrize("gated", [False, True])
def test_shared_mlp_is_added(cpu_kernels: Path, gated: bool) -> None:
    check(cpu_kernels, Mixture(PLAIN, shared=128, gated=gated))


@pytest.mark.parametrize(
    ("types", "form", "error"),
    [
        (("Q4_1", "Q4_1", "Q8_0"), Form.BITS_14, 1e-3),
        (("Q8_0", "Q4_0", "Q4_1"), Form.BITS_14, 1e-3),
        (("F16", "BF16", "F16"), Form.BITS_14, 1e-4),
        (("MXFP4", "MXFP4", "MXFP4"), Form.BITS_14, 1e-3),
        (("int4 g32 zeros", "int4 g32 zeros", "int8 channel"), Form.BITS_14, 1e-3),
        (("e4m3 channel", "e4m3 channel", "e4m3 channel"), Form.BITS_14, 1e-3),
        (("nf4 g64 nested", "nf4 g64 nested", "nf4 g64"), Form.BITS_14, 1e-3),
        (("int4 g32 zeros 1", "int4 g32 zeros 1", "int4 g128 zeros"), Form.BITS_14, 1e-3),
        (("int4 g32 zeros 1", "int4 g32 zeros 1", "int4 g32 zeros 1"), Form.BITS_8, 0.1),
        (("F32", "F32", "int4 g32 zeros 1"), Form.BITS_14, 1e-3),
        (("Q4_K", "Q4_K", "Q6_K"), Form.BITS_8, 0.03),
        (("Q4_K", "Q8_0", "Q2_K"), Form.BITS_8, 0.03),
    ],
)
def test_experts_have_weights_of_any_type(cpu_kernels: Path, types: Sequence[str], form: Form, error: float) -> None:
    check(cpu_kernels, Mixture(PLAIN, types, columns=256, hidden=256, shared=256), error, form, Gate.GELU)


@pytest.mark.parametrize(
    ("types", "error"),
    [(FLOATS, 2e-5), (("MXFP4", "MXFP4", "MXFP4"), 1e-3), (("Q8_0", "Q4_0", "Q4_1"), 1e-3)],
    ids=["floats", "MXFP4", "others"],
)
def test_biases_are_added_and_gates_clamped(cpu_kernels: Path, types: Sequence[str], error: float) -> None:
    mixture = Mixture(PLAIN, types, columns=256, hidden=256, biased=True)
    check(cpu_kernels, mixture, error, gate=Gate.CLAMPED)


def test_result_can_be_a_new_value(cpu_kernels: Path) -> None:
    mixture = Mixture(PLAIN)
    out = every_row(record(cpu_kernels, lambda ops, batch, kv: mixture.apply(ops, rows(ops, batch, mixture.x), None)))
    torch.testing.assert_close(out, mixture.expected(None), rtol=0, atol=2e-5 * float(out.abs().max()))


def test_selected_rows_choose_their_own_experts(cpu_kernels: Path) -> None:
    mixture, ids = Mixture(PLAIN, shared=64), [7, 3, 30, 11, 2]

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Any:
        return mixture.apply(ops, ops.select(rows(ops, batch, mixture.x), batch), None)

    it, every = record(cpu_kernels, forward), mixture.expected(None)
    for wanted in ([4, 1], [2], [0, 1, 2, 3, 4]):
        found = compute(it.step, batch_of(ids, wanted))
        chosen = every[[ids[index] for index in wanted]]
        torch.testing.assert_close(found, chosen, rtol=0, atol=2e-5 * float(every.abs().max()))


@pytest.mark.parametrize("score", Score)
def test_equal_scores_choose_the_lowest_experts(cpu_kernels: Path, score: Score) -> None:
    """All logits are 0, so the first experts are chosen, with equal weights."""
    mixture = Mixture(replace(PLAIN, score=score))
    zeros = torch.zeros(ROWS, mixture.columns)

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        mlp = mixture.make(ops)
        routes = ops.route(rows(ops, batch, zeros), mlp.router)
        return ops.experts(rows(ops, batch, mixture.x), routes, mlp)

    ops = ReferenceOperations(keep_dequantized=False)
    mlp = mixture.make(ops)
    wanted = sum(ops.gated_mlp(mixture.x, mlp.experts[number]) for number in range(3)) / 3
    assert isinstance(wanted, Tensor)
    out = every_row(record(cpu_kernels, forward))
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "groups"])
def test_logits_that_are_not_finite_choose_valid_experts(cpu_kernels: Path, name: str, value: float) -> None:
    """Guards after all buffers stay intact, and other tokens keep their results."""
    mixture = Mixture(ROUTINGS[name])
    spoiled = mixture.x
    spoiled[::3, 5] = value

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Any:
        return mixture.apply(ops, rows(ops, batch, spoiled), None)

    out = compute(record(cpu_kernels, forward).step, batch_of(range(ROWS)))
    kept = torch.arange(ROWS) % 3 != 0
    wanted = mixture.expected(None)
    torch.testing.assert_close(out[kept], wanted[kept], rtol=0, atol=2e-5 * float(wanted.abs().max()))


def test_experts_of_different_types_are_rejected(cpu_kernels: Path) -> None:
    mixture = Mixture(PLAIN)

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        mlp = mixture.make(ops)
        other = Mixture(PLAIN, ("Q8_0", "Q8_0", "Q8_0")).make(ops)
        mixed = replace(mlp, experts=(*mlp.experts[:-1], other.experts[-1]))
        x = rows(ops, batch, mixture.x)
        return ops.experts(x, ops.route(x, mlp.router), mixed)

    with pytest.raises(UnsupportedModel, match="different types"):
        record(cpu_kernels, forward)


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (("int4 g32 zeros 1", "int4 g32 zeros", "F32"), "gate and up in different orders"),
        (("F32", "int4 g32 zeros 1", "F32"), "gate and up"),
    ],
)
def test_experts_with_gate_and_up_in_different_orders_are_rejected(
    cpu_kernels: Path, types: Sequence[str], message: str
) -> None:
    mixture = Mixture(PLAIN, types)
    with pytest.raises(UnsupportedModel, match=message):
        record(cpu_kernels, lambda ops, batch, kv: mixture.apply(ops, rows(ops, batch, mixture.x), None))


def test_step_reads_only_the_chosen_experts(cpu_kernels: Path) -> None:
    """After the weights of all other experts are overwritten, a token's row keeps its bits."""
    mixture, made = Mixture(Routing(16, 2), ("Q4_1", "Q4_1", "Q8_0")), list[GatedMLP]()

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        mlp = mixture.make(ops)
        made.extend(mlp.experts)
        x = rows(ops, batch, mixture.x)
        return ops.experts(x, ops.route(x, mlp.router), mlp)

    step = record(cpu_kernels, forward).step
    before = compute(step, batch_of([5]))
    (ids,) = (region for region, _ in step.arena._regions if region.name == "ids")
    chosen = ids.view(np.int64, 2).tolist()
    for number, mlp in enumerate(made):
        parts = [*cpu_layer(mlp.gate_up).parts, *cpu_layer(mlp.down).parts]
        for part in parts if number not in chosen else ():
            part.region.bytes[:] = 0xFF
    assert torch.equal(compute(step, batch_of([5])), before)
    assert not compute(step, batch_of(range(ROWS))).isfinite().all()
