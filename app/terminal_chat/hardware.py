"""What a model will run on, in a few words, before anything heavy is loaded."""

import os

from app.progress import format_bytes


def hardware() -> str:
    """Such as "on 8 cores, with 23.1 GB of memory free". Whether a GPU can be used, the engine finds out."""
    from engine.backends.cuda.discovery import driver_version
    from engine.kv.budget import available_memory

    gpu = "an NVIDIA GPU and " if driver_version() is not None else ""
    cores = os.cpu_count() or 1
    return (
        f"on {gpu}{cores} {'core' if cores == 1 else 'cores'}, with {format_bytes(available_memory())} of memory free"
    )
