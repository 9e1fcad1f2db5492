"""The machine that figures are measured on: a GPU or, for a dry run, the CPU with small sizes."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quant.kernels.card import Card
from tests.gpu.figures import Peaks

DRY_CARD = Card("no card", (9, 0), 132, 232448, 50 << 20, 80 << 30, interpreted=True)
Call = Callable[[], object]

REPLAYS = 15
SPAN = 2e-3  # minimum duration of a captured graph in seconds, so that its launch time is negligible


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU, and its measured peaks."""

    card: Card
    peaks: Peaks

    @property
    def dry(self) -> bool:
        return self.card.interpreted

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    def scaled(self, real: int, dry: int) -> int:
        return dry if self.dry else real

    def copies(self, nbytes: int) -> int:
        """Return how many buffers of this size to use in turn. Together they exceed four times the cache's size."""
        return 1 if self.dry else 1 + 4 * self.card.l2_bytes // max(1, nbytes)

    def seconds(self, calls: Sequence[Call]) -> float:
        """Return the seconds per call when all calls run in one CUDA graph: the median of several replays."""
        if self.dry:
            return _elapsed(calls)
        graph = _captured(calls)
        once = statistics.median(_timed(graph.replay) for _ in range(3))
        if once < SPAN:
            calls = list(calls) * min(64, round(SPAN / once) + 1)
            graph = _captured(calls)
        return statistics.median(_timed(graph.replay) for _ in range(REPLAYS)) / len(calls)

    def seconds_without_graph(self, call: Call) -> float:
        """Return the seconds of a call that cannot be captured."""
        if self.dry:
            return _elapsed([call])
        _timed(call)
        return statistics.median(_timed(call) for _ in range(REPLAYS))

    def seconds_on_host(self, call: Call) -> float:
        """Return the seconds of a call that returns only when the device has finished."""
        if not self.dry:
            call()
        return statistics.median(_elapsed([call]) for _ in range(self.scaled(REPLAYS, 1)))


def _elapsed(calls: Sequence[Call]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls)


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Capture calls as a CUDA graph, after running each once to compile and allocate."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in dict.fromkeys(calls):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def _timed(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
