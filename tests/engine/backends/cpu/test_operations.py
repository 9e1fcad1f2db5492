"""Each operation in a step, against the reference implementation, and operations that recording rejects."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.cpu.buffers import Activation
from engine.backends.cpu.instructions import SEGMENT, Limits
from engine.backends.cpu.operations import CpuOperations, LogitRows, block_shape
from engine.backends.cpu.program import Program
from engine.batch import Batch, build_batch, placeholder_batch
from engine.errors import UnsupportedModel
from engine.kernels import reference
from engine.kv.cache import KVCache
from engine.model_config import Gate, NormKind, RopeConfig
from engine.operations import Attention, GatedMLP, Norm
from engine.rope import rotary_table
from engine.step import StepPlan
from quant.cpu.activations import Form
from quant.cpu.arena import Arena
from quant.cpu.linear import CpuBackend
from quant.errors import UnsupportedQuantization
from quant.kernels.reference import dequantize, matmul
from quant.linear import ReferenceBackend
from quant.tensor import QTensor
from tests.engine.backends.cpu.recorded import Forward, Recorded, compute, cpu_group, layer, plain, record, sequence
from tests.quant.cpu.integer_reference import product
from tests.quant.cpu.random_weights import TYPES, bits, random_weight, width
from tests.support.kv_groups import kv_group

SEED = 8
ROWS = 40  # number of rows in the tables that activations are read from; also the largest number of tokens per step
WIDTH = 96
EPSILON = 1e-5
NARROW = [name for name in TYPES if width(name, 32) == 32]  # types whose blocks fit into WIDTH

pytestmark = pytest.mark.usefixtures("every_layout")


def normal(*shape: int, seed: int = SEED) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, Y, SCALE = normal(ROWS, WIDTH) * 3, normal(ROWS, WIDTH, seed=SEED + 1), normal(WIDTH)
RMS = Norm(SCALE, EPSILON)
LAYER = Norm(SCALE, EPSILON, NormKind.LAYER)
BIASED = replace(LAYER, bias=normal(WIDTH, seed=SEED + 2))
NORMED = reference.normalize(X, RMS)
KINDS = pytest.mark.parametrize("norm", [RMS, LAYER, BIASED], ids=["rms", "layer", "biased"])


def rows(ops: CpuOperations, batch: Batch, values: Tensor) -> Activation:
    """Return a row of `values` for each token: the one whose index is the token's id."""
    return ops.embed(batch, layer(ops, plain(values)))


def normed(ops: CpuOperations, batch: Batch) -> Activation:
    return ops.norm(rows(ops, batch, X), RMS)


def close_to_normalized(out: Tensor, norm: Norm, x: Tensor) -> None:
    """Assert that `out` is the norm of `x`. Layer norms get an absolute tolerance, because they subtract the mean."""
    absolute = 0.0 if norm.kind is NormKind.RMS else 2e-6
    torch.testing.assert_close(out, reference.normalize(x, norm), rtol=2e-6, atol=absolute)


def weights(names: Sequence[str], outputs: Sequence[int], columns: int = WIDTH) -> list[QTensor]:
    rng = np.random.default_rng(SEED)
    return [random_weight(name, count, columns, rng) for name, count in zip(names, outputs, strict=True)]


def batch_of(ids: Sequence[int], wanted: Sequence[int] | None = None) -> Batch:
    """Return a batch of one request's tokens that computes the logits of the `wanted` tokens (default: all)."""
    request = sequence(1, ids, [3, 1, 4])
    plan = StepPlan((request.part(0, len(ids)),))
    batch = build_batch(plan, vocab_size=ROWS, num_blocks=64)
    return replace(batch, logit_rows=range(len(ids)) if wanted is None else wanted)


def every_row(it: Recorded) -> Tensor:
    """Return the output of all rows in one step. Checks that other step sizes and thread counts give the same bits."""
    together = compute(it.step, batch_of(range(ROWS)), 2)
    rng = random.Random(SEED)
    for count, threads in ((1, 1), (1, 2), (2, 1), (3, 2), (4, 1), (5, 1), (9, 1), (ROWS - 1, 1)):
        some = rng.sample(range(ROWS), count)
        assert torch.equal(bits(compute(it.step, batch_of(some), threads)), bits(together[some]))
    return together


@pytest.mark.parametrize("name", NARROW)
def test_embed_dequantizes_rows_of_every_type(cpu_kernels: Path, name: str) -> None:
    (weight,) = weights([name], [ROWS])
    out = every_row(record(cpu_kernels, lambda ops, batch, kv: ops.embed(batch, layer(ops, weight))))
    assert torch.equal(out, dequantize(weight))


@pytest.mark.parametrize("scale", [0.0, 1.0, 25.3])
def test_embed_applies_the_scale(cpu_kernels: Path, scale: float) -> None:
    (weight,) = weights(["Q8_0"], [ROWS])
    out = every_row(record(cpu_kernels, lambda ops, batch, kv: ops.embed(batch, layer(ops, weight), scale)))
    assert torch.equal(out, dequantize(weight) * scale)


@KINDS
def test_norm_can_be_added_to_rows(cpu_kernels: Path, norm: Norm) -> None:
    """The sum is then read as floats and as integers."""
    (weight,) = weights(["Q8_0"], [64])

    def added(ops: CpuOperations, batch: Batch) -> Activation:
        return ops.norm(rows(ops, batch, X), norm, add_to=rows(ops, batch, Y))

    out = every_row(record(cpu_kernels, lambda ops, batch, kv: added(ops, batch)))
    torch.testing.assert_close(out, Y + reference.normalize(X, norm), rtol=2e-6, atol=2e-6)
    read = every_row(record(cpu_kernels, lambda ops, batch, kv: ops.linear(added(ops, batch), layer(ops, weight))))
    assert torch.equal(read, CpuBackend(Arena(), Form.BITS_14).linear([weight]).forward(out))


PARTS = 3
PART = Norm(torch.linspace(0.5, 1.5, WIDTH // PARTS), EPSILON, sum_scale=0.7)


@pytest.mark.parametrize("selected", [False, True])
def test_parts_of_rows_are_normalized_and_the_sum_is_scaled(cpu_kernels: Path, selected: bool) -> None:
    def added(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        x, y = (ops.select(it, batch) if selected else it for it in (rows(ops, batch, X), rows(ops, batch, Y)))
        return ops.norm(x, PART, add_to=y)

    out = every_row(record(cpu_kernels, added))
    normed = reference.normalize(X.view(ROWS, PARTS, -1), PART).view(X.shape)
    torch.testing.assert_close(out, (Y + normed) * 0.7, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("gate", [Gate.SILU, Gate.GELU])
@pytest.mark.parametrize("part", range(PARTS))
def test_gate_is_multiplied_by_a_part_of_other_rows(cpu_kernels: Path, gate: Gate, part: int) -> None:
    size = WIDTH // PARTS
    (weight,) = weights(["Q8_0"], [64], size)

    def gated(ops: CpuOperations, batch: Batch) -> Activation:
        return ops.gate_part(rows(ops, batch, X[:, :size].contiguous()), rows(ops, batch, Y), part, gate)

    out = every_row(record(cpu_kernels, lambda ops, batch, kv: gated(ops, batch)))
    wanted = reference.gated_product(X[:, :size], Y[:, part * size : (part + 1) * size], gate)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    read = every_row(record(cpu_kernels, lambda ops, batch, kv: ops.linear(gated(ops, batch), layer(ops, weight))))
    product = CpuBackend(Arena(), Form.BITS_14).linear([weight]).forward(out)
    torch.testing.assert_close(read, product, rtol=1e-3, atol=1e-3)


@KINDS
def test_norm_of_selected_rows_is_added_to_selected_rows(cpu_kernels: Path, norm: Norm) -> None:
    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        given, x = (ops.select(rows(ops, batch, values), batch) for values in (X, Y))
        return ops.norm(given, norm, add_to=x)

    it = record(cpu_kernels, forward)
    for ids, wanted in (([5, 6, 7], [1]), ([9], [0]), (range(ROWS), [0, 3, 39]), ([1, 2], [1, 0])):
        tokens = [ids[index] for index in wanted]
        out = compute(it.step, batch_of(ids, wanted))
        torch.testing.assert_close(out, (Y + reference.normalize(X, norm))[tokens], rtol=2e-6, atol=2e-6)


@KINDS
def test_norm_equals_the_reference(cpu_kernels: Path, norm: Norm) -> None:
    out = every_row(record(cpu_kernels, lambda ops, batch, kv: ops.norm(rows(ops, batch, X), norm)))
    close_to_normalized(out, norm, X)


@KINDS
def test_linear_reads_normalized_rows(cpu_kernels: Path, norm: Norm) -> None:
    """The norm is quantized; in a step of one token each thread writes its own copy."""
    (weight,) = weights(["Q8_0"], [64])
    out = every_row(record(cpu_kernels, lambda ops, batch, kv: ops.norm(rows(ops, batch, X), norm)))
    read = every_row(
        record(cpu_kernels, lambda ops, batch, kv: ops.linear(ops.norm(rows(ops, batch, X), norm), layer(ops, weight)))
    )
    assert torch.equal(read, CpuBackend(Arena(), Form.BITS_14).linear([weight]).forward(out))


@KINDS
def test_select_returns_output_rows_with_and_without_norm(cpu_kernels: Path, norm: Norm) -> None:
    def selected(ops: CpuOperations, batch: Batch) -> Activation:
        return ops.select(rows(ops, batch, X), batch)

    picked = record(cpu_kernels, lambda ops, batch, kv: selected(ops, batch))
    after = record(cpu_kernels, lambda ops, batch, kv: ops.norm(selected(ops, batch), norm))
    for ids, wanted in (([5, 6, 7], [1]), ([9], [0]), (range(ROWS), [0, 3, 3, 39]), ([4, 4, 2], []), ([1, 2], [1, 0])):
        batch, tokens = batch_of(ids, wanted), [ids[index] for index in wanted]
        assert torch.equal(compute(picked.step, batch), X[tokens])
        close_to_normalized(compute(after.step, batch), norm, X[tokens])


SEGMENTS = [
    *((name,) for name in NARROW),
    ("F16", "Q4_0"),
    ("Q4_1", "Q8_0", "F32", "BF16"),
    ("int4 g64 zeros",),
    ("nf4 g64 nested", "e4m3 tensor"),
    ("int4 g32 zeros 1",),
    ("int8 channel 1", "nf4 g64 2"),
    ("int4 g32 zeros 1", "int4 g32 zeros 2", "int8 channel 1", "Q4_0"),
]


@pytest.mark.parametrize("form", [Form.BITS_8, Form.BITS_14])
@pytest.mark.parametrize("names", SEGMENTS)
def test_linear_equals_the_layers_product(cpu_kernels: Path, names: Sequence[str], form: Form) -> None:
    """The input is a norm, which writes its output in each activation format that a segment reads."""
    segments = weights(names, {1: [96], 2: [33, 63], 4: [33, 40, 47, 8]}[len(names)])
    x = every_row(record(cpu_kernels, lambda ops, batch, kv: normed(ops, batch)))
    out = every_row(
        record(cpu_kernels, lambda ops, batch, kv: ops.linear(normed(ops, batch), layer(ops, *segments)), form=form)
    )
    assert torch.equal(out, CpuBackend(Arena(), form).linear(segments).forward(x))


@pytest.mark.parametrize("names", SEGMENTS)
def test_linear_adds_to_existing_rows(cpu_kernels: Path, names: Sequence[str]) -> None:
    outputs = [WIDTH - 8 * (len(names) - 1), *[8] * (len(names) - 1)]
    segments = weights(names, outputs)

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        return ops.linear(rows(ops, batch, X), layer(ops, *segments), add_to=rows(ops, batch, Y))

    there = np.split(Y.numpy(), np.cumsum(outputs)[:-1], axis=1)
    parts = [product(segment, X.numpy(), Form.BITS_14, y) for segment, y in zip(segments, there, strict=True)]
    assert torch.equal(every_row(record(cpu_kernels, forward)), torch.from_numpy(np.hstack(parts)))


@pytest.mark.parametrize("names", SEGMENTS)
@pytest.mark.parametrize("adding", [False, True])
def test_linear_adds_the_bias_once(cpu_kernels: Path, names: Sequence[str], adding: bool) -> None:
    """Steps of different sizes give the same result, with and without `add_to`."""
    outputs = [WIDTH - 7 * (len(names) - 1), *[7] * (len(names) - 1)]
    segments, bias = weights(names, outputs), normal(WIDTH, seed=SEED + 2)

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        add_to = rows(ops, batch, Y) if adding else None
        return ops.linear(rows(ops, batch, X), layer(ops, *segments), add_to, bias)

    there = np.split((Y + bias if adding else bias.expand(ROWS, -1)).numpy(), np.cumsum(outputs)[:-1], axis=1)
    parts = [product(segment, X.numpy(), Form.BITS_14, y) for segment, y in zip(segments, there, strict=True)]
    assert torch.equal(every_row(record(cpu_kernels, forward)), torch.from_numpy(np.hstack(parts)))


def test_norm_is_written_before_its_source_is_added_to(cpu_kernels: Path) -> None:
    """The norm reads the rows that the first segment's product is added to. All activation formats of its output must
    be complete before that.
    """
    segments = weights(["F16", "Q4_0"], [33, 63])

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        x = rows(ops, batch, X)
        return ops.linear(ops.norm(x, RMS), layer(ops, *segments), add_to=x)

    before = every_row(record(cpu_kernels, lambda ops, batch, kv: normed(ops, batch))).numpy()
    there = np.split(X.numpy(), [33], 1)
    parts = [product(segment, before, Form.BITS_14, x) for segment, x in zip(segments, there, strict=True)]
    it = record(cpu_kernels, forward)
    together = every_row(it)
    assert torch.equal(together, torch.from_numpy(np.hstack(parts)))
    for token in range(ROWS):
        assert torch.equal(compute(it.step, batch_of([token]), 2)[0], together[token])


@pytest.mark.parametrize(
    ("gate", "up", "down", "error"),
    [
        (["F32"], ["F32"], ["F32"], 1e-5),
        (["F16"], ["BF16"], ["F16"], 1e-5),
        (["Q4_0"], ["Q4_0"], ["Q4_0"], 1e-3),
        (["Q4_1"], ["Q8_0"], ["F16"], 1e-3),
        (["F32"], ["F16"], ["Q8_0"], 1e-3),
        (["Q8_0"], ["Q4_0"], ["Q4_1", "BF16", "Q8_0"], 1e-3),
        (["int4 g32 zeros 1"], ["int4 g32 zeros 1"], ["int8 channel 1"], 1e-3),
        (["int4 g32 zeros 1"], ["int4 g32 zeros 2"], ["e4m3 channel"], 1e-3),
        (["nf4 g64 nested"], ["e5m2 tensor"], ["nf4 g64 2"], 1e-3),
    ],
)
@pytest.mark.parametrize("kind", Gate)
def test_gated_mlp_equals_the_reference(
    cpu_kernels: Path, gate: list[str], up: list[str], down: list[str], error: float, kind: Gate
) -> None:
    """The reference multiplies the same weights in float32. `error` is the limit relative to the largest output."""
    width = 2 * WIDTH
    gate_up = weights([*gate, *up], [width, width])
    downs = weights(down, [WIDTH - 8 * (len(down) - 1), *[8] * (len(down) - 1)], width)

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        mlp = GatedMLP(layer(ops, *gate_up), layer(ops, *downs))
        return ops.gated_mlp(normed(ops, batch), mlp, rows(ops, batch, Y), kind)

    hidden = reference.gated(matmul(NORMED, torch.cat([dequantize(weight) for weight in gate_up])), kind)
    added = matmul(hidden, torch.cat([dequantize(weight) for weight in downs]))
    out = every_row(record(cpu_kernels, forward))
    torch.testing.assert_close(out, Y + added, rtol=0, atol=error * float(added.abs().max()))


@pytest.mark.parametrize(
    ("gate", "up", "down"),
    [("Q4_K", "Q4_K", "Q6_K"), ("Q4_K", "IQ4_XS", "Q2_K"), ("Q8_0", "Q8_0", "Q4_K"), ("Q8_0", "Q3_K", "Q5_K")],
)
def test_gated_mlp_supports_super_blocks(cpu_kernels: Path, gate: str, up: str, down: str) -> None:
    """The down projection has blocks of 256 columns, so its input cannot be written 32 columns at a time."""
    x = normal(ROWS, 256)
    gate_up, (last,) = weights([gate, up], [512, 512], 256), weights([down], [256], 512)

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        return ops.gated_mlp(rows(ops, batch, x), GatedMLP(layer(ops, *gate_up), layer(ops, last)), None, Gate.GELU)

    hidden = reference.gated(matmul(x, torch.cat([dequantize(weight) for weight in gate_up])), Gate.GELU)
    added = matmul(hidden, dequantize(last))
    out = every_row(record(cpu_kernels, forward, form=Form.BITS_8))
    torch.testing.assert_close(out, added, rtol=0, atol=0.03 * float(added.abs().max()))


@pytest.mark.parametrize("vocabulary", [1, 15, 33, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 777])
def test_logits_and_argmax_equal_the_reference(cpu_kernels: Path, vocabulary: int) -> None:
    (head,) = weights(["Q8_0"], [vocabulary], 32)
    x = normal(ROWS, 32)

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> LogitRows:
        return ops.logits(ops.select(rows(ops, batch, x), batch), layer(ops, head))

    it = record(cpu_kernels, forward)
    expected = CpuBackend(Arena()).linear([head]).forward(x)
    for ids, wanted in ((range(ROWS), None), ([7], [0]), ([3, 4, 5], [2, 0]), ([3, 4, 5], [])):
        batch = batch_of(ids, wanted)
        values = compute(it.step, batch)
        tokens = [ids[int(index)] for index in batch.logit_rows]
        assert torch.equal(bits(values), bits(expected[tokens]))
        assert it.step.logits(len(tokens)).greedy == [int(row.argmax()) for row in values]


def test_argmax_returns_the_first_of_equal_logits(cpu_kernels: Path) -> None:
    """The equal logits are in one vector of 16, in several vectors, or in several segments."""
    vocabulary = 3 * SEGMENT
    for ids in ([5, 9], [9, 21], [16, 1], [100, SEGMENT + 3, 99], [2 * SEGMENT, SEGMENT + 17, SEGMENT + 1], [0, 16]):
        head = torch.zeros(vocabulary, 32)
        head[ids] = 1

        def forward(ops: CpuOperations, batch: Batch, kv: KVCache, head: Tensor = head) -> LogitRows:
            return ops.logits(rows(ops, batch, torch.ones(ROWS, 32)), layer(ops, plain(head)))

        it = record(cpu_kernels, forward)
        compute(it.step, batch_of([0, 1]))
        assert it.step.logits(2).greedy == [min(ids)] * 2


@pytest.mark.parametrize("vocabulary", [15, SEGMENT + 1])
def test_soft_cap_is_applied_before_argmax(cpu_kernels: Path, vocabulary: int) -> None:
    """If the cap makes logits equal, the first one wins."""
    head = normal(vocabulary, WIDTH)

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> LogitRows:
        return ops.logits(rows(ops, batch, X), layer(ops, plain(head)), 1.0)

    it = record(cpu_kernels, forward)
    values = compute(it.step, batch_of(range(ROWS)))
    torch.testing.assert_close(values, reference.soft_cap(X @ head.T, 1.0), rtol=0, atol=1e-4)
    assert ((values == 1).sum(-1) > 1).any()
    assert it.step.logits(ROWS).greedy == [int(row.argmax()) for row in values]
    assert torch.equal(compute(it.step, batch_of([7, 3]), 2), values[[7, 3]])


def test_argmax_of_nan_logits_is_negative(cpu_kernels: Path) -> None:
    spoiled = X.clone()
    spoiled[3] = torch.nan
    head = plain(normal(50, WIDTH))
    it = record(cpu_kernels, lambda ops, batch, kv: ops.logits(rows(ops, batch, spoiled), layer(ops, head)))
    compute(it.step, batch_of([2, 3, 4]))
    chosen = it.step.logits(3).greedy
    assert chosen is not None
    assert [token_id < 0 for token_id in chosen] == [False, True, False]
    assert compute(it.step, batch_of([2, 4])).isfinite().all()
    assert compute(it.step, batch_of([2, 3, 4], [])).shape == (0, 50)


def test_attention_output_can_be_read_by_every_operation(cpu_kernels: Path) -> None:
    """The cases include steps of one token, in which each thread has its own copy of some rows."""

    def attended(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        attention = Attention(32**-0.5, rotary_table(RopeConfig(10000.0, 32, interleaved=True), None, 320))
        q = ops.rope_and_store(rows(ops, batch, X), batch, kv.layer(0), attention)
        return ops.attend(q, batch, kv.layer(0), attention)

    norm = Norm(normal(32), EPSILON)
    readers: dict[str, Forward] = {
        "linear": attended,
        "norm": lambda ops, batch, kv: ops.norm(attended(ops, batch, kv), norm),
        "select": lambda ops, batch, kv: ops.select(attended(ops, batch, kv), batch),
    }
    out = {}
    for name, forward in readers.items():
        it = record(cpu_kernels, forward, groups=[kv_group((0,), 1, 32)])
        out[name] = torch.cat([compute(it.step, batch_of([token]), 2) for token in range(ROWS)])
    assert torch.equal(out["select"], out["linear"])
    torch.testing.assert_close(out["norm"], reference.normalize(out["linear"], norm), rtol=2e-6, atol=0)


def test_buffers_are_reused(cpu_kernels: Path) -> None:
    """Ten layers need as much memory as two, apart from their weights."""
    sizes = []
    for layers in (2, 10):

        def forward(ops: CpuOperations, batch: Batch, kv: KVCache, layers: int = layers) -> Activation:
            x, square = rows(ops, batch, X), layer(ops, *weights(["Q4_0"], [WIDTH]))
            gate_up, down = layer(ops, *weights(["Q4_0"] * 2, [WIDTH] * 2)), layer(ops, *weights(["Q8_0"], [WIDTH]))
            for _ in range(layers):
                x = ops.linear(ops.linear(ops.norm(x, RMS), square), square, x)
                x = ops.gated_mlp(ops.norm(x, RMS), GatedMLP(gate_up, down), x)
            return x

        it = record(cpu_kernels, forward)
        every_row(it)
        sizes.append(it.step.arena.nbytes)
    assert sizes[0] == sizes[1]


# -- operations that recording rejects


def recording() -> tuple[CpuOperations, Batch, KVCache]:
    arena = Arena()
    limits = Limits(tokens=4, outputs=4, requests=2, context=32, num_blocks=(4,), threads=1)
    kv = KVCache([cpu_group(kv_group((0,), 1, 32))], [4])
    return CpuOperations(CpuBackend(arena), Program(arena, limits)), placeholder_batch(), kv


@pytest.mark.parametrize("head_dim", [1, 8, 40, 72])
def test_head_dimension_must_be_whole_vectors(head_dim: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"head dimension of {head_dim}"):
        block_shape(torch.float16, 2, head_dim)


def test_mlp_width_must_be_a_multiple_of_32() -> None:
    ops, batch, _ = recording()
    x = rows(ops, batch, X)
    mlp = GatedMLP(layer(ops, *weights(["F32", "F32"], [40, 40])), layer(ops, *weights(["F32"], [WIDTH])))
    with pytest.raises(UnsupportedModel, match="width 40"):
        ops.gated_mlp(x, mlp, x)


@pytest.mark.parametrize("kinds", [("F32", "Q4_0"), ("Q8_0", "F16")])
def test_gate_and_up_with_different_forms_are_multiplied_separately(cpu_kernels: Path, kinds: tuple[str, str]) -> None:
    gate, up = weights(list(kinds), [64, 64])
    (down,) = weights(["Q4_1"], [WIDTH], 64)

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        x = rows(ops, batch, X)
        normed = ops.norm(x, Norm(torch.ones(WIDTH), EPSILON))
        return ops.gated_mlp(normed, GatedMLP(layer(ops, gate, up), layer(ops, down)), x)

    ours = compute(record(cpu_kernels, forward).step, batch_of(range(ROWS)))
    x = reference.normalize(X, Norm(torch.ones(WIDTH), EPSILON))
    both = x @ torch.cat([dequantize(gate), dequantize(up)]).T
    exact = X + reference.gated(both, Gate.SILU) @ dequantize(down).T
    assert (ours - exact).norm() < 1e-3 * exact.norm()


def test_quantized_row_width_must_be_whole_groups() -> None:
    ops, batch, _ = recording()
    narrow = ops.linear(rows(ops, batch, X), layer(ops, *weights(["F32"], [33])))
    with pytest.raises(UnsupportedModel, match="33 columns"):
        narrow.rows(Form.BITS_8)
    with pytest.raises(UnsupportedQuantization, match="33 columns"):
        layer(ops, *weights(["F32"], [8], 33))


def test_layers_of_another_backend_are_rejected() -> None:
    ops, batch, _ = recording()
    foreign = ReferenceBackend(keep_dequantized=True).linear(weights(["F32"], [8]))
    with pytest.raises(TypeError, match="ReferenceLinear"):
        ops.embed(batch, foreign)
    with pytest.raises(TypeError, match="ReferenceLinear"):
        ops.linear(rows(ops, batch, X), foreign)


def test_batch_larger_than_recorded_is_rejected(cpu_kernels: Path) -> None:
    it = record(cpu_kernels, lambda ops, batch, kv: rows(ops, batch, X), tokens=4, context=48)
    with pytest.raises(IndexError, match="5 tokens"):
        it.step.fill(batch_of(range(5)))
    parts = tuple(sequence(n, [1], [2]).part(0, 1, samples=False) for n in range(5))
    with pytest.raises(IndexError, match="5 requests"):
        it.step.fill(build_batch(StepPlan(parts), vocab_size=ROWS, num_blocks=64))
    with pytest.raises(IndexError, match="exceed the recorded limits"):
        it.step.fill(replace(batch_of([1]), context_lengths=(49,)))
    for _ in range(2):  # twice: a rejected table must not be remembered
        with pytest.raises(IndexError, match="longer than the recorded limit"):
            it.step.fill(replace(batch_of([1]), block_tables=([[3, 1, 4, 5]],)))
    assert torch.equal(compute(it.step, batch_of([3, 2])), X[[3, 2]])
