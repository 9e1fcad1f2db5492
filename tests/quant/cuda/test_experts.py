"""Products of tokens and their experts, compared with plain torch."""

import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.model_config import Gate
from quant.cuda.backend import CudaBackend
from quant.cuda.experts import ExpertStack, stacked, tiles_of_experts
from quant.cuda.loading import to_device
from quant.cuda.matrix import CudaMatrix
from quant.errors import UnsupportedQuantization
from quant.kernels.integer_rows import integer_inputs
from quant.kernels.reference import dequantize, expert_product
from quant.kernels.token_tiles import token_tiles
from quant.tensor import GroupedTensor, QTensor
from tests.quant.cpu.random_weights import random_weight, width
from tests.quant.cuda.test_linear import CARD
from tests.quant.kernels.test_token_tiles import random_ids

pytestmark = pytest.mark.usefixtures("fenced_memory")

EXPERTS = 4
ORDERED = "int4 g32 zeros 1"  # columns are permuted
KINDS = (
    "Q4_K", "Q6_K", "Q8_0", "MXFP4", "Q3_K", "int4 g128 zeros", "nf4 g64 nested", ORDERED,
    "e4m3 channel", "e4m3 128x128", "BF16", "F32",
)  # fmt: skip


def segments(kinds: tuple[str, ...], rows: int, columns: int) -> list[list[QTensor]]:
    rng = np.random.default_rng()
    return [[_shuffled(random_weight(kind, rows, columns, rng)) for kind in kinds] for _ in range(EXPERTS)]


def _shuffled(weight: QTensor) -> QTensor:
    """Return a weight with another order of columns, if they are permuted."""
    if isinstance(weight, GroupedTensor) and weight.order is not None:
        return replace(weight, order=torch.randperm(weight.shape[1]).int())
    return weight


def stack_of(layers: list[list[QTensor]], device: torch.device, *, deterministic: bool = False) -> ExpertStack:
    return CudaBackend(device, CARD, deterministic).stack(layers, EXPERTS)


def values_of(layers: list[list[QTensor]]) -> Tensor:
    return torch.stack([torch.cat([dequantize(it) for it in layer]) for layer in layers])


def check(got: Tensor, x: Tensor, values: Tensor, ids: Tensor) -> None:
    """Check that the error is no larger than rounding the weights to bfloat16 causes."""
    bound = expert_product(x.float().abs(), values.abs(), ids.long()) / 256
    assert ((got.cpu() - expert_product(x.float(), values, ids.long())).abs() <= bound + 1e-4).all()


@pytest.mark.share(2, "size")
@pytest.mark.parametrize("size", [1, 16, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_multiplied_by_their_experts(kind: str, size: int, device: torch.device) -> None:
    layers = segments((kind,), 24, width(kind, 160))
    stack, values = stack_of(layers, device), values_of(layers)
    tokens = 3 if size == 1 else 11
    ids = random_ids(tokens, 2, EXPERTS).to(device)
    tiles = token_tiles(ids, EXPERTS, min(size, stack.most_slots))
    x = torch.randn(tokens, stack.inputs).bfloat16()
    check(stack.multiply(x.to(device), tiles, torch.float32), x, values, ids.cpu())
    of_slots = torch.randn(2 * tokens, stack.inputs).bfloat16()
    check(stack.multiply(of_slots.to(device), tiles, torch.float32), of_slots, values, ids.cpu())


@pytest.mark.parametrize("tokens", [1, 9])
def test_gate_and_up_may_have_different_kinds(tokens: int, device: torch.device) -> None:
    layers = segments(("Q4_K", "Q6_K", "e4m3 channel"), 16, 256)
    stack = stack_of(layers, device)
    assert [matrix.shape[0] for matrix in stack.matrices] == [16 * EXPERTS] * 3
    ids = random_ids(tokens, 2, EXPERTS).to(device)
    x = torch.randn(tokens, 256).bfloat16()
    got = stack.multiply(x.to(device), tiles_of_experts(ids, [stack]), torch.float32)
    check(got, x, values_of(layers), ids.cpu())


@pytest.mark.parametrize("gate", Gate)
@pytest.mark.parametrize(("kind", "rows"), [("Q4_K", 48), ("Q6_K", 16)])
def test_product_of_one_slot_may_be_gated(kind: str, rows: int, gate: Gate, device: torch.device) -> None:
    layers = segments((kind, kind), rows, 256)
    stack = stack_of(layers, device)
    ids, x = random_ids(2, 2, EXPERTS), torch.randn(2, 256).bfloat16()
    got = stack.multiply_gated(x.to(device), token_tiles(ids.to(device), EXPERTS, 1), gate.value)
    product = expert_product(x.float(), values_of(layers), ids.long())
    want = reference.gated(product, gate)
    assert got is not None
    torch.testing.assert_close(got.float().cpu(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
    assert stack.multiply_gated(x.to(device), token_tiles(ids.to(device), EXPERTS, 16), gate.value) is None


@pytest.mark.parametrize("kind", ["Q4_0", "e4m3 128x128", "BF16"])
def test_expert_is_a_layer_with_its_own_weight(kind: str, device: torch.device) -> None:
    layers = segments((kind, kind), 24, 256)
    experts = CudaBackend(device, CARD, deterministic=False).experts(iter(layers), EXPERTS)
    for expert, values in zip(experts, values_of(layers), strict=True):
        torch.testing.assert_close(expert.dequantize().cpu(), values, rtol=1e-5, atol=1e-6)


@pytest.mark.share(1)
@pytest.mark.parametrize("kind", ["Q4_K", "e4m3 channel", "BF16"])
def test_bits_do_not_depend_on_the_batch_in_deterministic_mode(kind: str, device: torch.device) -> None:
    stack = stack_of(segments((kind,), 24, 256), device, deterministic=True)
    ids, x = random_ids(40, 2, EXPERTS).to(device), torch.randn(40, 256, device=device)

    def product(first: int, last: int) -> Tensor:
        tiles = tiles_of_experts(ids[first:last], [stack])
        return stack.multiply(x[first:last], tiles, torch.float32).view(-1, 2, 24)

    whole = product(0, 40)
    for first, last in ((0, 1), (7, 30), (39, 40)):
        assert torch.equal(product(first, last), whole[first:last])


@pytest.mark.parametrize(
    ("kinds", "uses_integers"),
    [
        (("Q4_K",), True),
        (("Q4_K", "Q6_K"), True),
        (("MXFP4",), True),
        ((ORDERED,), False),
        (("Q4_K", "e4m3 channel"), False),
        (("BF16",), False),
    ],
)
def test_tiles_of_many_slots_are_multiplied_in_integers(
    kinds: tuple[str, ...], uses_integers: bool, device: torch.device
) -> None:
    layers = segments(kinds, 24, 256)
    stack = CudaBackend(device, CARD, deterministic=False, integer_prompts=True).stack(layers, EXPERTS)
    ids = random_ids(150, 2, EXPERTS)
    tiles = tiles_of_experts(ids.to(device), [stack])
    assert stack.takes_integers(tiles) == uses_integers
    assert not stack.takes_integers(tiles_of_experts(ids[:20].to(device), [stack]))
    assert not stack_of(layers, device).takes_integers(tiles)
    always = CudaBackend(device, CARD, deterministic=True, integer_prompts=True).stack(layers, EXPERTS)
    assert not always.takes_integers(tiles)
    x = torch.randn(150, 256).bfloat16()
    got = stack.multiply(x.to(device), tiles, torch.float32)
    want = expert_product(x.float(), values_of(layers), ids.long())
    error = (got.cpu() - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert error <= 0.015
    if uses_integers:
        assert torch.equal(stack.multiply(integer_inputs(x.to(device)), tiles, torch.float32), got)
        assert error >= 0.002  # bfloat16 is closer


def test_matrices_of_an_expert_are_dropped_before_those_of_the_second_next_are_made(device: torch.device) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def layers() -> Iterator[list[CudaMatrix]]:
        for (segment,) in segments(("Q4_0",), 16, 256):
            assert not any(it() is not None for it in alive[:-1])
            matrix = to_device(segment, device)
            alive.append(weakref.ref(matrix.row_tensors["low"]))
            yield [matrix]
            del matrix

    (whole,) = stacked(layers(), EXPERTS)
    assert whole.shape == (16 * EXPERTS, 256)
    assert len(alive) == EXPERTS


def test_experts_of_different_types_are_refused(device: torch.device) -> None:
    layers = segments(("Q4_0",), 24, 256)
    layers[-1] = segments(("Q8_0",), 24, 256)[0]
    with pytest.raises(UnsupportedQuantization) as refusal:
        stack_of(layers, device)
    assert "--device cpu" in str(refusal.value.remedy)
