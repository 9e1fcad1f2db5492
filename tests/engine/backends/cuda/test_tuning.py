"""Measuring the tiles of a mixture of experts with a simulated clock."""

from collections.abc import Callable, Sequence

import pytest
import torch

from engine.backends.cuda.tuning import Tuning
from quant.cuda.experts import TILE_TOKENS
from quant.kernels.card import Card
from quant.kernels.tile_search import rule_tile
from quant.kernels.tiles import TOKENS
from tests.engine.backends.cuda.two_devices import INTERPRETED, gpu
from tests.gpu.random_checkpoint import RandomCheckpoint
from tests.kernels.shapes import TINY_EXPERTS


def test_experts_are_measured_with_tiles_of_one_and_of_several_slots(device: torch.device) -> None:
    measured: list[int] = []

    def timer(calls: Sequence[Callable[[], object]]) -> float:
        measured.append(len(calls))
        calls[0]()
        return 1.0

    checkpoint = RandomCheckpoint(TINY_EXPERTS, "Q4_0", device)
    tuning = Tuning(checkpoint, gpu(device), lambda done, total: None, timer)
    sizes = [(1, 2), *((tokens, 4) for tokens in TILE_TOKENS)]  # slots of a tile, experts in use
    gate_up, down = ([(*shape, *size) for size in sizes] for shape in ((64, 64), (64, 32)))
    of_experts = [shape for shape in tuning.shapes if shape.experts]
    assert [(it.outputs, it.inputs, it.tokens, it.experts) for it in of_experts] == gate_up + down
    assert {shape.tokens for shape in tuning.shapes if not shape.experts} == set(TOKENS)
    for shape in (of_experts[0], of_experts[len(gate_up) + 1]):
        assert tuning._seconds(shape, rule_tile(shape, INTERPRETED)) == 1.0
    assert measured == [1, 1]


@pytest.mark.parametrize(("bits", "slots"), [(8, {1, 16, 32}), (14, {1, *TILE_TOKENS}), (0, {1, *TILE_TOKENS})])
def test_tiles_that_are_multiplied_as_integers_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, bits: int, slots: set[int]
) -> None:
    monkeypatch.setattr(Card, "prefers_integers", True)
    checkpoint = RandomCheckpoint(TINY_EXPERTS, "Q4_0", device)
    tuning = Tuning(checkpoint, gpu(device), lambda done, total: None, lambda calls: 1.0, activation_bits=bits)
    assert {shape.tokens for shape in tuning.shapes if shape.experts} == slots
    assert {shape.tokens for shape in tuning.shapes if not shape.experts} == set(TOKENS)
