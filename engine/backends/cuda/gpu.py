"""One GPU, driven through torch. With an interpreted card, the CPU runs the kernels instead.

Only this module handles the difference: without a GPU nothing is asynchronous, so there is nothing to wait for.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from quant.kernels.card import Card


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """A point in a GPU stream, reached when everything launched before it has ended."""

    _event: torch.cuda.Event | None

    def wait(self) -> None:
        """Block until the GPU has reached the event."""
        if self._event is not None:
            self._event.synchronize()


class CopyStream:
    """A stream for copies, which runs in parallel with other streams.

    On exit, the context manager waits for the copies that were started inside it.
    """

    def __init__(self, gpu: "Gpu") -> None:
        self._gpu = gpu
        self._stream = None if gpu.card.interpreted else torch.cuda.Stream(gpu.index)  # type: ignore[no-untyped-call]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy asynchronously if the host memory is pinned. Otherwise the calling thread waits for the copy."""
        target.copy_(source, non_blocking=True)

    def __enter__(self) -> Self:
        if self._stream is not None:
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._stream.synchronize()
            self._inside.__exit__(*error)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU on which kernels are launched."""

    card: Card
    index: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.card.interpreted else torch.device("cuda", self.index)

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which this thread launches kernels on this GPU. The current GPU is set per thread."""
        return contextlib.nullcontext() if self.card.interpreted else torch.cuda.device(self.index)

    def make_current(self) -> None:
        """Make this the current GPU of the calling thread."""
        if not self.card.interpreted:
            torch.cuda.set_device(self.index)

    def staging(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate pinned host memory for asynchronous copies.

        The tensor may be dropped while a copy is running: the memory is not reused before the copy has ended.
        """
        return torch.empty(shape, dtype=dtype, pin_memory=not self.card.interpreted)

    def record_event(self) -> GpuEvent:
        """Record and return an event after all work that this thread has launched on its stream so far."""
        if self.card.interpreted:
            return GpuEvent(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return GpuEvent(event)

    def graph_pool(self) -> Any:
        """Return a memory pool that several graphs can share if they never run at the same time."""
        return None if self.card.interpreted else torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None], pool: Any) -> Callable[[], None]:
        """Capture the kernels that `work` launches as a CUDA graph, and return a function that replays them.

        The graph always uses the same tensors. `work` runs once before the capture, so that kernels are compiled and
        libraries allocate their memory. Raises RuntimeError if the capture fails.
        """
        if self.card.interpreted:
            return work
        side_stream: Any = torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream(self.index))
        with torch.cuda.stream(side_stream):
            work()
        torch.cuda.current_stream(self.index).wait_stream(side_stream)
        graph: Any = torch.cuda.CUDAGraph()
        # With thread_local, other threads may copy blocks during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=side_stream, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    def copy_stream(self) -> CopyStream:
        return CopyStream(self)

    def pin(self, memory: Tensor) -> bool:
        """Pin host memory for asynchronous copies from and to the GPU. Returns whether this succeeded."""
        if self.card.interpreted:
            return True
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0

    def unpin(self, memory: Tensor) -> None:
        if not self.card.interpreted:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(memory.data_ptr())

    def free_memory(self) -> int:
        """Return the number of free bytes, including those that this process's allocator caches."""
        free, _ = torch.cuda.mem_get_info(self.index)
        return free + torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)

    def own_memory(self) -> int:
        """Return the number of bytes that this process has allocated on the GPU."""
        return torch.cuda.memory_allocated(self.index)

    def peak_memory(self, work: Callable[[], object]) -> int:
        """Run `work`, and return the peak of the bytes that it allocates."""
        before = self.own_memory()
        torch.cuda.reset_peak_memory_stats(self.index)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.index) - before

    def drop_caches(self) -> None:
        """Return the allocator's cached memory to the driver."""
        if not self.card.interpreted:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for everything that was launched on the GPU."""
        if not self.card.interpreted:
            torch.cuda.synchronize(self.index)


def read_card(index: int) -> Card:
    """Return the properties of the GPU with this index in torch's list."""
    found: Any = torch.cuda.get_device_properties(index)  # torch's type hints lack some attributes
    return Card(
        name=found.name,
        capability=(found.major, found.minor),
        multiprocessors=found.multi_processor_count,
        shared_memory=found.shared_memory_per_block_optin,
        l2_bytes=found.L2_cache_size,
        memory_bytes=found.total_memory,
    )


# Values of a mid-range card. They determine the number of tokens per step, and otherwise hardly affect an estimate.
CAPABILITY, MULTIPROCESSORS, SHARED_MEMORY, L2_BYTES = (8, 9), 46, 99 << 10, 36 << 20


@dataclass(frozen=True, slots=True)
class PlannedGpu(Gpu):
    """A hypothetical GPU for estimates. All of its memory is free."""

    def free_memory(self) -> int:
        return self.card.memory_bytes

    def own_memory(self) -> int:
        return 0


def planned_gpu(memory: int) -> PlannedGpu:
    """Return a hypothetical GPU with this number of bytes of memory, for estimates."""
    return PlannedGpu(Card("a GPU", CAPABILITY, MULTIPROCESSORS, SHARED_MEMORY, L2_BYTES, memory))
