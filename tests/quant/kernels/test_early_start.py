"""Tests of what products of one row do before they wait for their input, recorded in the interpreter."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from quant.cuda.loading import to_device
from quant.cuda.matrix import PackedMatrix
from quant.kernels import packed_scales, packed_vector
from quant.kernels.packed_product import row_product
from quant.kernels.tiles import ProductTile
from tests.conftest import ON_GPU
from tests.quant.cpu.random_weights import random_weight

pytestmark = pytest.mark.skipif(ON_GPU, reason="a GPU does not show what a program loads")

LINE = 128  # bytes
KINDS = {"Q4_K": 32, "Q6_K": 16, "Q8_0": 32, "Q5_K": 32, "MXFP4": 32, "int4 g32 zeros 1": 32}  # with their groups
ROWS = 40  # of three programs


@dataclass
class Program:
    """Addresses that one program reads."""

    prefetched: set[int] = field(default_factory=set)
    before: set[int] = field(default_factory=set)  # loaded before the wait
    after: set[int] = field(default_factory=set)
    waited: bool = False

    def load(self, addresses: set[int]) -> None:
        (self.after if self.waited else self.before).update(addresses)


@pytest.fixture
def programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Program]:
    """The programs of a launch by their numbers."""
    found: dict[tuple[int, ...], Program] = {}
    builder, load = interpreter.interpreter_builder, interpreter.InterpreterBuilder.create_masked_load

    def own() -> Program:
        return found.setdefault(tuple(builder.grid_idx), Program())

    def prefetch(at: Any) -> None:
        own().prefetched.update(np.ravel(at.handle.data).tolist())

    def wait_for_inputs(early: Any) -> None:
        own().waited = True

    def recording(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        shown = np.broadcast_to(mask.data, pointers.data.shape)
        own().load(set(pointers.data[shown].ravel().tolist()))
        return load(self, pointers, mask, *rest)

    for module in (packed_scales, packed_vector):
        monkeypatch.setattr(module, "prefetch", prefetch)
    monkeypatch.setattr(packed_vector, "wait_for_inputs", wait_for_inputs)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", recording)
    return found


def lines(addresses: set[int], tensor: Tensor) -> set[int]:
    """Return the numbers of the cache lines of a tensor that contain these addresses."""
    first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return {(it - first) // LINE for it in addresses if first <= it < end}


@pytest.mark.parametrize("tile", [ProductTile(16, 2, 1), ProductTile(16, 8, 1, 1, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_the_first_step_are_prefetched_before_the_wait(
    kind: str, tile: ProductTile, programs: dict[tuple[int, ...], Program]
) -> None:
    columns = 8 * KINDS[kind] * tile.warps  # so that there is one step
    matrix = to_device(random_weight(kind, ROWS, columns, np.random.default_rng()), torch.device("cpu"))
    assert isinstance(matrix, PackedMatrix)
    x, out = torch.randn(1, columns).bfloat16(), torch.full((1, ROWS), torch.nan)
    row_product(matrix, x, out, tile, early=True)
    early, recorded = out.clone(), deepcopy(programs)
    row_product(matrix, x, out, tile, early=False)
    assert torch.equal(out, early)
    codes = [it for it in (matrix.low, matrix.high) if it is not None]
    scales = [it for it in (matrix.scales, matrix.sub_scales, matrix.zeros) if it is not None]
    assert len(recorded) == 3
    for program in recorded.values():
        assert program.waited
        assert not program.before
        assert all(lines(program.prefetched, it) == lines(program.after, it) for it in codes)
        assert all(set() < lines(program.prefetched, it) <= lines(program.after, it) for it in scales)
        assert all(any(lines({at}, it) for it in (*codes, *scales)) for at in program.prefetched)
