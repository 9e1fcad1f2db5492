"""How much memory a model would find here, and whether one of some size is likely to fit: told without torch, where
there is no GPU, and without a look at the model. `app.models.fit` tells it exactly.
"""

from app.config import Settings

_ROOM = 1.15  # bytes that a model takes for each of its files, with a context of some length


def machine_memory(settings: Settings) -> int:
    """Bytes that are free where a model would compute."""
    from engine.cuda.driver import driver_version
    from engine.kv_budget import available_memory

    if settings.device != "cpu" and driver_version() is not None:
        from engine.cuda.finding import Unusable, find_gpu

        gpu = find_gpu()
        if not isinstance(gpu, Unusable):
            return gpu.free_memory()
    return available_memory()


def is_likely_to_fit(size: int, memory: int) -> bool:
    """Whether a model whose files have so many bytes would."""
    return size * _ROOM <= memory
