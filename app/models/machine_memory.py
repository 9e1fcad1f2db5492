"""How much memory a model would find here, and whether one of some size is likely to fit: told without torch, where
there is no GPU, and without a look at the model. `app.models.fit` tells it exactly.
"""

from pathlib import Path

from app.settings.settings import Settings

_ROOM = 1.15  # bytes that a model takes for each of its files, with a context of some length


def machine_memory(settings: Settings) -> int:
    """Bytes that are free where a model would compute."""
    from engine.backends.cuda.discovery import driver_version
    from engine.kv.budget import available_memory

    if settings.device != "cpu" and driver_version() is not None:
        from engine.backends.cuda.discovery import Unusable, find_gpu

        gpu = find_gpu()
        if not isinstance(gpu, Unusable):
            return gpu.free_memory()
    return available_memory()


def memory_without_gpu() -> int | None:
    """The same where there is no GPU; None where there may be one, since it would take torch to ask it."""
    from engine.backends.cuda.discovery import driver_version
    from engine.kv.budget import available_memory

    return available_memory() if driver_version() is None else None


def is_likely_to_fit(size: int, memory: int) -> bool:
    """Whether a model whose files have so many bytes would."""
    return size * _ROOM <= memory


def resident_bytes() -> int | None:
    """Memory of this process that is in no file; None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    found = (line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    kibibytes = next(found, "")
    return int(kibibytes) << 10 if kibibytes.isdecimal() else None
