"""An engine on a card whose driver does nothing: tensors are in host memory, and no kernel runs.

Only calls are counted, so all tokens are the first one of the vocabulary.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from engine.backends.cuda import runner
from engine.backends.cuda.gpu import Gpu
from engine.kernels.sampling_rows import Sampled, to_sampled_tokens
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.step import SampledToken
from quant.kernels.card import Card
from tests.engine.backends.cuda.fake_cuda import FakeCuda

FREE = 8 << 30  # bytes of the card
CARD = Card("a card", (9, 0), 132, 232448, 50 << 20, FREE)
CPU = torch.device("cpu")


def _first_tokens(sampled: Sampled, *arguments: Any) -> list[SampledToken]:
    """Return tokens with the id 0 instead of those in memory that no kernel has written."""
    sampled.buffer.zero_()
    return to_sampled_tokens(sampled, *arguments)


@dataclass
class IdleCard(FakeCuda):
    """Counts what a step does: launches, transfers, events, and waits."""

    launches: int = 0
    captured: list[int] = field(default_factory=list)  # launches of each captured graph
    transfers: int = 0  # allocations of pinned host memory, of which each transfer takes one
    before_capture: int = 0

    def call(self, name: str) -> None:
        super().call(name)
        if name == "capture_begin":
            self.before_capture = self.launches
        if name == "capture_end":
            self.captured.append(self.launches - self.before_capture)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the driver and the launches of kernels."""
        super().install(monkeypatch)
        monkeypatch.setattr(Gpu, "device", CPU)
        monkeypatch.setattr(Gpu, "staging", self._staging)
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", self._launch)
        monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
        monkeypatch.setattr(runner, "to_sampled_tokens", _first_tokens)
        results = {
            "set_device": None,
            "synchronize": None,
            "empty_cache": None,
            "reset_peak_memory_stats": None,
            "mem_get_info": (FREE, FREE),
            "memory_reserved": 0,
            "memory_allocated": 0,
            "max_memory_allocated": 0,
        }
        for name, result in results.items():
            monkeypatch.setattr(torch.cuda, name, self._named(name, result))

    def engine(self, path: Path, **options: Any) -> ModelEngine:
        """Load a model on this card."""
        with open_checkpoint(path) as checkpoint:
            return load_engine(checkpoint, LoadOptions(backend="cuda", card=CARD, host_cache=0, **options))

    @contextmanager
    def counting(self) -> Iterator["Counts"]:
        """Count what happens in the body."""
        calls, launches, transfers, streams = len(self.calls), self.launches, self.transfers, len(self.streams)
        counts = Counts()
        with _Operations(counts.operations):
            yield counts
        counts.calls.update(self.calls[calls:])
        counts.launches = self.launches - launches
        counts.transfers, counts.streams = self.transfers - transfers, len(self.streams) - streams

    def _named(self, name: str, result: Any) -> Any:
        def call(*_arguments: Any) -> Any:
            if name not in ("memory_allocated", "memory_reserved"):
                self.call(name)
            return result

        return call

    def _launch(self, *_arguments: Any, **_options: Any) -> None:
        self.launches += 1

    def _staging(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        self.transfers += 1
        return torch.zeros(shape, dtype=dtype)


@dataclass
class Counts:
    """The number of each kind of call."""

    calls: Counter[str] = field(default_factory=Counter)  # of the driver
    operations: Counter[str] = field(default_factory=Counter)  # functions of torch, without views
    launches: int = 0
    transfers: int = 0
    streams: int = 0


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts functions of torch that are no views."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [it for it in (*args, result) if isinstance(it, torch.Tensor)]
        if not func.is_view and not any(it.is_meta for it in tensors):
            self._counts[func.overloadpacket.__name__] += 1
        return result


@contextmanager
def without_compilation() -> Iterator[None]:
    """Skip the compilation of kernels in advance, which needs Triton's own driver."""
    with mock.patch("engine.backends.cuda.device.CudaDevice._compile_kernels"):
        yield
