"""A stand-in for torch.cuda that records streams, captures, and calls, for tests of driver code without a GPU."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch


@dataclass
class FakeCuda:
    """Records calls. Each name of `broken` raises RuntimeError when it is called."""

    calls: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    streams: list[tuple[int, int]] = field(default_factory=list)  # (GPU index, priority) of each created stream
    pools: list[Any] = field(default_factory=list)  # memory pool of each capture
    current: list[Any] = field(default_factory=list)  # streams that contexts have made current
    num_pools: int = 0

    def call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise RuntimeError(f"injected into {name}")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the functions of torch.cuda that the backend uses."""
        monkeypatch.setattr(torch.cuda, "Stream", lambda index=0, priority=0: FakeStream(self, index, priority))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        monkeypatch.setattr(torch.cuda, "Event", self.new_event)
        monkeypatch.setattr(torch.cuda, "stream", self.inside)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: FakeStream(self, -1, 0))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.new_pool)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, lambda *_, name=name: self.call(name), raising=False)

    def new_event(self, *, blocking: bool = False) -> "FakeEvent":
        return FakeEvent(self, blocking)

    def new_pool(self) -> int:
        self.num_pools += 1
        return self.num_pools

    @contextlib.contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()


class FakeStream:
    def __init__(self, cuda: FakeCuda, index: int, priority: int) -> None:
        self._cuda = cuda
        if index >= 0:
            cuda.streams.append((index, priority))

    def wait_stream(self, other: Any) -> None:
        self._cuda.call("wait_stream")

    def synchronize(self) -> None:
        self._cuda.call("synchronize")


@dataclass
class FakeEvent:
    """An event. If it is not blocking, a thread that waits for it spins."""

    cuda: FakeCuda
    blocking: bool

    def record(self) -> None:
        self.cuda.call("record")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.cuda.call("wait" if self.blocking else "spin")


class FakeGraph:
    """A CUDA graph. It is captured on the current stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self._cuda.pools.append(pool)
        self._cuda.call("capture_begin")

    def capture_end(self) -> None:
        self._cuda.call("capture_end")

    def replay(self) -> None:
        self._cuda.call("replay")
