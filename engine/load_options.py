"""LoadOptions: the caller's choices when it loads a model. Plain values; `engine.loading` resolves the defaults."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.config import ALL_FREE, TARGET_LATENCY, MemoryLimit, Preemption
from engine.cpu_threads import ThreadPool
from engine.errors import LoadStopped
from engine.turns import Turns
from quant.kernels.card import Card

KernelReport = Callable[[int, int], None]
ANY_DEVICE, ANY_GPU = "auto", "cuda"


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Options of the disk tier of the KV cache."""

    folder: Path  # root folder that contains the caches of all models
    limit: int | None  # size limit of the root folder in bytes; None: an automatic limit based on the free space
    model: str = ""  # name shown to users


def _never() -> bool:  # unlike a lambda, it can be pickled
    return False


@dataclass(frozen=True, slots=True)
class LoadControl:
    """The caller's control over a running load. Functions are called from any thread."""

    is_stopped: Callable[[], bool] = _never  # whether the load is to end at the next tensor
    # returns whether other engines of this process have computed in the last second; the load then uses one thread
    is_busy: Callable[[], bool] = _never

    def check(self) -> None:
        """Raise LoadStopped if the load has been stopped."""
        if self.is_stopped():
            raise LoadStopped("The load was stopped")


UNCONTROLLED = LoadControl()


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for loading a model. Zero means automatic."""

    backend: str = "auto"
    context_length: int = 0
    threads: int = 0
    activation_bits: int = 0  # bits of rounded activations, 8 or 14; 0: `default_activation_bits`
    cpu_threads: ThreadPool | None = None  # threads shared by all CPU models of the process; None: each has its own
    turns: Turns | None = None  # order of the steps of all CPU models of the process; None: all at the same time
    cpu_tier: str = "auto"  # instruction set tier of the CPU kernels, one of `quant.cpu.tiers.CHOICES`
    kv_type: str = "auto"  # one of the KV cache types of the device
    # limit of the size of the host pools in bytes; None: the device's default (on a CPU: no host pools)
    host_cache: int | None = None
    device: str = ANY_DEVICE  # auto, cpu, cuda, or cuda:N
    gpu_memory: MemoryLimit = ALL_FREE
    # bytes of host memory that a load may take: on a CPU all, beside a GPU those of host pools and of weights that stay
    # in the host's memory; 0: a share of the free memory
    host_memory: int = 0
    assumed_memory: int = 0  # bytes of free host memory to assume in estimates; 0: the actual free memory
    draft_memory: int = 0  # bytes of the device's memory to leave for the draft model, which is loaded afterwards
    deterministic: bool = False  # make results on a GPU independent of other requests, as they are on the CPU
    step_depth: int = 0
    drafts: bool = True  # whether to verify drafted tokens where this is expected to be faster
    card: Card | None = None  # an interpreted card, whose kernels run on the CPU, for tests without a GPU
    preemption: Preemption = Preemption.AUTO
    target_latency: float = TARGET_LATENCY
    fingerprint: str = ""  # sha256 of the model file, in hex; empty: unknown
    disk: DiskOptions | None = None  # None: the disk tier is off
    report_kernels: KernelReport | None = None  # takes the numbers of compiled GPU kernels and of all GPU kernels
    code_cache: Path | None = None  # folder for compiled kernels and measured tiles; None: they are not saved
    control: LoadControl = UNCONTROLLED

    @property
    def asks_for_gpu(self) -> bool:
        """Whether the options require a GPU rather than prefer one."""
        return self.backend == "cuda" or self.device.startswith(ANY_GPU) or self.card is not None
