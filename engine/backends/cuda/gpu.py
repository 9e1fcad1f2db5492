"""One GPU, driven through torch. With an interpreted card, the CPU runs the kernels instead.

Only this module handles the difference: without a GPU nothing is asynchronous, so there is nothing to wait for.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from quant.kernels.card import Card

CAPTURE_PRIORITY = -1  # higher than that of copy streams, which is 0


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """A point in a GPU stream, reached when everything launched before it has ended."""

    _event: torch.cuda.Event | None

    def wait(self) -> None:
        """Block until the GPU has reached the event."""
        if self._event is not None:
            self._event.synchronize()

    def is_reached(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]


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


class CaptureStream:
    """The stream on which all CUDA graphs of an engine are captured, and the memory pool that the graphs share.

    The allocator reuses a block only on the stream that it was allocated for. Graphs may share a pool if they never run
    at the same time.
    """

    def __init__(self, gpu: "Gpu") -> None:
        self._gpu = gpu
        self._stream: Any = None
        if not gpu.card.interpreted:
            # torch returns 32 streams per priority in turn. With the priority of copy streams, this could be one of
            # them, and copies would be captured.
            self._stream = torch.cuda.Stream(gpu.index, priority=CAPTURE_PRIORITY)  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        """Use a new memory pool for later captures. Call this when all graphs are dropped: torch does not allow
        captures into a pool that no graph uses.
        """
        self._pool: Any = None if self._stream is None else torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the kernels that `work` launches as a CUDA graph, and return a function that replays them.

        The graph always uses the same tensors. `work` runs once before the capture, so that kernels are compiled and
        libraries allocate their memory. Raises RuntimeError if the capture fails.
        """
        if self._stream is None:
            return work
        caller = torch.cuda.current_stream(self._gpu.index)
        self._stream.wait_stream(caller)
        graph: Any = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                work()
                self._capture(graph, work)
        finally:  # the caller may overwrite what `work` reads
            caller.wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay

    def _capture(self, graph: Any, work: Callable[[], None]) -> None:
        """Capture `work`. The context manager torch.cuda.graph would also wait for the GPU and empty all caches."""
        # With thread_local, other threads may copy blocks during the capture.
        with self._detaching_on_failure():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            with self._detaching_on_failure():
                graph.capture_end()

    @contextlib.contextmanager
    def _detaching_on_failure(self) -> Iterator[None]:
        """Detach the allocator from the pool if a capture cannot start or end. torch leaves it attached, and then
        cannot empty its caches.
        """
        try:
            yield
        except RuntimeError:
            self._detach()
            raise

    def _detach(self) -> None:
        functions: Any = torch._C
        for end in (functions._cuda_endAllocateToPool, functions._cuda_releasePool):
            with contextlib.suppress(RuntimeError):
                end(self._gpu.index, self._pool)


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
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # else the waiting thread spins
        event.record()
        return GpuEvent(event)

    def capture_stream(self) -> "CaptureStream":
        return CaptureStream(self)

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
        """Return the number of bytes that the driver reports as free."""
        free, _ = torch.cuda.mem_get_info(self.index)
        return free

    def own_memory(self) -> int:
        """Return the number of bytes that this process's allocator holds on the GPU, including cached ones."""
        return torch.cuda.memory_reserved(self.index)

    def peak_memory(self, work: Callable[[], object]) -> int:
        """Run `work`, and return the peak of the bytes that it allocates.

        The allocator counts for the whole process, so no other engine may compute on this GPU meanwhile.
        """
        before = torch.cuda.memory_allocated(self.index)
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
