"""A GPU that is not there, with as much memory as somebody asks about: what a model would find on it can be told."""

from dataclasses import dataclass

from engine.cuda.gpu import Gpu
from quant.kernels.card import Card

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
