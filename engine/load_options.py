"""LoadOptions: what a caller requests when it loads a model. Plain values; `engine.loading` resolves the defaults."""

from dataclasses import dataclass
from pathlib import Path

from engine.config import ALL_FREE, TARGET_LATENCY, MemoryLimit, Preemption
from quant.kernels.card import Card

ANY_DEVICE, ANY_GPU = "auto", "cuda"


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """The disk tier of the KV cache."""

    folder: Path  # root folder of all models
    limit: int | None  # size limit of the root folder in bytes; None: an automatic limit by the free space
    model: str = ""  # name for people


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a loaded model. Zero means automatic."""

    backend: str = "auto"
    context_length: int = 0
    threads: int = 0
    activation_bits: int = 0  # bits to which CPU kernels round activations, 8 or 14
    cpu_tier: str = "auto"  # one of `quant.cpu.tiers.CHOICES`
    kv_type: str = "auto"  # one of the device's types
    host_cache: int | None = None  # bytes of the host pool; None: the device's default, which is none on a CPU
    device: str = ANY_DEVICE  # auto, cpu, cuda, or cuda:N
    gpu_memory: MemoryLimit = ALL_FREE
    host_memory: int = 0  # bytes of host memory that a model may use on the CPU; 0: all free memory
    deterministic: bool = False  # on a GPU, make results independent of other requests, as they are on the CPU
    step_depth: int = 0
    card: Card | None = None  # for tests without a GPU: an interpreted card whose kernels run on the CPU
    preemption: Preemption = Preemption.AUTO
    target_latency: float = TARGET_LATENCY
    fingerprint: str = ""  # sha256 of the model file, in hex; empty: unknown
    disk: DiskOptions | None = None  # None: no disk tier
    code_cache: Path | None = None  # folder for compiled kernels and measured tiles; None: they are not saved

    @property
    def asks_for_gpu(self) -> bool:
        """Whether a GPU is required, not only preferred."""
        return self.backend == "cuda" or self.device.startswith(ANY_GPU) or self.card is not None
