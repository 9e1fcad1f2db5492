"""What the composition root asks for of a model that is loaded: plain values, all chosen or left to choose.

Refuses to know how a choice is made.
"""

from dataclasses import dataclass
from pathlib import Path

from engine.config import ALL_FREE, TARGET_LATENCY, MemoryLimit, Preemption
from quant.kernels.card import Card

ANY_DEVICE, ANY_GPU = "auto", "cuda"


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Where computed blocks are kept when the process ends."""

    folder: Path  # of all models
    limit: int | None  # bytes of it; None: chosen by what is free
    model: str = ""  # what people call it


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the composition root asks for. Zero means: choose."""

    backend: str = "auto"
    context_length: int = 0
    threads: int = 0
    activation_bits: int = 0  # 8 or 14, to which CPU kernels round
    cpu_tier: str = "auto"  # one of `quant.cpu.tiers.CHOICES`
    kv_type: str = "auto"  # one of those that the device has
    host_cache: int | None = None  # bytes of the host pool; None: as many as suit the device, and none on a CPU
    device: str = ANY_DEVICE  # or cpu, or cuda, or cuda:N
    gpu_memory: MemoryLimit = ALL_FREE
    host_memory: int = 0  # bytes that there are for a model that computes in the host's memory; 0: what is free
    deterministic: bool = False  # on a GPU, too: what a request gets does not depend on what else runs
    step_depth: int = 0
    card: Card | None = None  # in place of a GPU: an interpreted one, with which kernels run on the CPU
    preemption: Preemption = Preemption.AUTO
    target_latency: float = TARGET_LATENCY
    fingerprint: str = ""  # sha256 of the model file, in hex; empty: not known
    disk: DiskOptions | None = None  # None: nothing is written to disk
    code_cache: Path | None = None  # where compiled kernels are kept, and measured tiles; None: for this process alone

    @property
    def asks_for_gpu(self) -> bool:
        """And for nothing else."""
        return self.backend == "cuda" or self.device.startswith(ANY_GPU) or self.card is not None
