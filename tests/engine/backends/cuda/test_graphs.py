"""CUDA graphs of decode steps: the order of captures, and failed captures."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.backends.cuda import graphs
from engine.backends.cuda.batch_tensors import BatchTensors
from engine.backends.cuda.gpu import CaptureStream, Gpu
from engine.backends.cuda.graph_sizes import GraphSize
from engine.backends.cuda.graphs import StepGraphs
from engine.batch import Batch
from engine.kernels.attention_tiles import TileQueries
from quant.kernels.card import Card

CARD = Card("a card", (9, 0), 132, 232448, 50 << 20, 80 << 30)
CPU = torch.device("cpu")
VOCABULARY = 7


@dataclass
class FakeGpu:
    """A GPU that records the order of captures, and fails those for which `failures` has an error."""

    card: Card = CARD
    failures: list[Exception | None] = field(default_factory=list)
    captures: int = 0
    dropped: int = 0
    resets: int = 0
    device: torch.device = CPU

    def capture(self, work: Any) -> Any:
        self.captures += 1
        if self.failures and (error := self.failures.pop(0)) is not None:
            raise error
        return work

    def reset(self) -> None:
        self.resets += 1

    def drop_caches(self) -> None:
        self.dropped += 1


def step_graphs(gpu: FakeGpu, computed: list[BatchTensors]) -> StepGraphs:
    def compute(tensors: BatchTensors) -> Tensor:
        computed.append(tensors)
        return torch.zeros(1, VOCABULARY)

    stream = cast(CaptureStream, gpu)
    graphs = StepGraphs(cast(Gpu, gpu), compute, TileQueries(few=2, many=8), GraphSize(3, 2048), VOCABULARY, stream)
    gpu.resets = 0
    return graphs


TENSORS = cast(BatchTensors, SimpleNamespace(draws=None))
SIZE, OTHER = GraphSize(1, 1024), GraphSize(2, 1024)


def test_sizes_are_ordered_by_memory_largest_first() -> None:
    sizes = step_graphs(FakeGpu(), []).sizes
    assert [(it.requests, it.queries, it.context) for it in sizes] == [
        (3, 1, 2048), (3, 1, 1024), (1, 2, 2048), (1, 2, 1024), (2, 1, 2048), (2, 1, 1024), (1, 1, 2048), (1, 1, 1024)
    ]  # fmt: skip


def test_size_without_a_graph_is_captured_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs, "RETRY_STEPS", 5)
    gpu, computed = FakeGpu(failures=[RuntimeError("no")]), list[BatchTensors]()
    steps = step_graphs(gpu, computed)
    for _ in range(6):  # the failed capture, and RETRY_STEPS steps
        steps.run(SIZE, TENSORS)
    assert (gpu.captures, steps.failed_captures, len(computed)) == (1, 1, 6)
    assert steps.fitting_size(Batch([0], [0], (), (), [0, 1], [1], [0])) == SIZE
    assert caplog.text.count("could not be captured: no") == 1
    steps.run(OTHER, TENSORS)  # other sizes are not affected
    assert gpu.captures == 2
    for _ in range(3):
        steps.run(SIZE, TENSORS)
    assert (gpu.captures, steps.failed_captures) == (3, 1)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("Triton Error [CUDA]: out of memory")])
def test_capture_without_memory_is_retried_after_caches_are_dropped(error: Exception) -> None:
    gpu = FakeGpu(failures=[error])
    steps = step_graphs(gpu, [])
    steps.run(SIZE, TENSORS)
    assert (gpu.captures, gpu.dropped, steps.failed_captures) == (2, 1, 0)


def test_failed_sizes_are_captured_again_after_memory_was_released() -> None:
    gpu = FakeGpu(failures=[RuntimeError("no"), None])
    steps = step_graphs(gpu, [])
    steps.run(SIZE, TENSORS)
    steps.clear()
    steps.run(SIZE, TENSORS)
    assert (gpu.captures, gpu.resets) == (2, 1)
