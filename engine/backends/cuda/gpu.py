"""One GPU as torch drives it; or, where its card is interpreted, the CPU in its place.

The one module that knows of the difference: without a GPU nothing is asynchronous, so that there is nothing to wait
for. Refuses to know what is computed."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from quant.kernels.card import Card


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the order of what a GPU does."""

    _event: torch.cuda.Event | None

    def wait(self) -> None:
        """Return when the GPU has got there."""
        if self._event is not None:
            self._event.synchronize()


class CopyStream:
    """Copies in their order, beside everything else that the GPU does. As a context: what was begun in it has ended
    when it is left."""

    def __init__(self, gpu: "Gpu") -> None:
        self._gpu = gpu
        self._stream = None if gpu.card.interpreted else torch.cuda.Stream(gpu.index)  # type: ignore[no-untyped-call]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Memory of the host must be pinned, or the thread waits for each."""
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
    """What launches go to."""

    card: Card
    index: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.card.interpreted else torch.device("cuda", self.index)

    def current(self) -> AbstractContextManager[object]:
        """Within it, kernels are launched on this GPU: every thread has one of its own that it launches on."""
        return contextlib.nullcontext() if self.card.interpreted else torch.cuda.device(self.index)

    def make_current(self) -> None:
        """The same, for all that this thread will do."""
        if not self.card.interpreted:
            torch.cuda.set_device(self.index)

    def staging(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies from and to the GPU need not wait for. Whoever lets go of it may do so while
        a copy is under way: it is given to nobody else before that has ended."""
        return torch.empty(shape, dtype=dtype, pin_memory=not self.card.interpreted)

    def mark(self) -> Mark:
        """Here and now, behind all that this thread has launched on its stream."""
        if self.card.interpreted:
            return Mark(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Mark(event)

    def recordings_pool(self) -> Any:
        """Memory that recordings share which are replayed one after another."""
        return None if self.card.interpreted else torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None], pool: Any) -> Callable[[], None]:
        """What does again, at once, all that `work` launches, on the tensors that it launches it on. The work is done
        before: kernels are compiled then, and libraries take their memory. Raises RuntimeError."""
        if self.card.interpreted:
            return work
        aside: Any = torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self.index))
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream(self.index).wait_stream(aside)
        graph: Any = torch.cuda.CUDAGraph()
        # Other threads go on to copy blocks meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    def copy_stream(self) -> CopyStream:
        return CopyStream(self)

    def pin(self, memory: Tensor) -> bool:
        """Have the system leave memory of the host in its place, so that the GPU copies from and to it by itself. False
        where it does not."""
        if self.card.interpreted:
            return True
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0

    def unpin(self, memory: Tensor) -> None:
        if not self.card.interpreted:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(memory.data_ptr())

    def free_memory(self) -> int:
        """Bytes that nobody has, what this process keeps for later included."""
        free, _ = torch.cuda.mem_get_info(self.index)
        return free + torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)

    def own_memory(self) -> int:
        """Bytes that this process has taken."""
        return torch.cuda.memory_allocated(self.index)

    def peak_memory(self, work: Callable[[], object]) -> int:
        """Bytes that some work takes for itself, at most."""
        before = self.own_memory()
        torch.cuda.reset_peak_memory_stats(self.index)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.index) - before

    def drop_caches(self) -> None:
        """Give back what is only kept for later."""
        if not self.card.interpreted:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Return when all that was launched has ended."""
        if not self.card.interpreted:
            torch.cuda.synchronize(self.index)


def read_card(index: int) -> Card:
    """What there is at this place of torch's list."""
    found: Any = torch.cuda.get_device_properties(index)  # whose hints leave some out
    return Card(
        name=found.name,
        capability=(found.major, found.minor),
        multiprocessors=found.multi_processor_count,
        shared_memory=found.shared_memory_per_block_optin,
        l2_bytes=found.L2_cache_size,
        memory_bytes=found.total_memory,
    )


# What a card of the middle has: how many tokens a step takes depends on it, and little else of a plan.
CAPABILITY, MULTIPROCESSORS, SHARED_MEMORY, L2_BYTES = (8, 9), 46, 99 << 10, 36 << 20


@dataclass(frozen=True, slots=True)
class PlannedGpu(Gpu):
    """Nobody else uses it."""

    def free_memory(self) -> int:
        return self.card.memory_bytes

    def own_memory(self) -> int:
        return 0


def planned_gpu(memory: int) -> PlannedGpu:
    """One of so many bytes."""
    return PlannedGpu(Card("a GPU", CAPABILITY, MULTIPROCESSORS, SHARED_MEMORY, L2_BYTES, memory))
