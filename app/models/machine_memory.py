"""Estimates of free memory, and of whether a model of some size fits, without torch if there is no GPU.

They do not read the model. `app.models.fit` gives exact numbers.
"""

from collections.abc import Mapping

from app.models.residency.ledger import HOST
from app.settings.settings import Settings

_ROOM = 1.15  # bytes of memory per byte of the files, with a context of medium length


def machine_memory(settings: Settings) -> int:
    """Return the free memory, in bytes, of the device on which a model would run."""
    from engine.backends.cuda.driver import driver_version
    from engine.system_memory import available_memory

    if settings.device != "cpu" and driver_version() is not None:
        from engine.backends.cuda.discovery import Unusable, find_gpu

        gpu = find_gpu()
        if not isinstance(gpu, Unusable):
            return gpu.free_memory()
    return available_memory()


def memory_without_gpu() -> int | None:
    """Return the free memory in bytes if there is no GPU. None: there may be one, and only torch knows its memory."""
    from engine.backends.cuda.driver import driver_version
    from engine.system_memory import available_memory

    return available_memory() if driver_version() is None else None


def memory_limits(settings: Settings) -> Mapping[str, int]:
    """Return the bytes of each memory that all models may use together. A memory without a limit is left out."""
    from engine.system_memory import total_memory

    limit = settings.memory
    num_bytes = limit.num_bytes or round(limit.share * total_memory())
    return {HOST: num_bytes} if num_bytes else {}


def is_likely_to_fit(size: int, memory: int) -> bool:
    """Whether a model whose files have `size` bytes is likely to fit into `memory` bytes."""
    return size * _ROOM <= memory
