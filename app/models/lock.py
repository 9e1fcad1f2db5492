"""Keeps two processes from fetching, writing or removing the same model at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.progress import Progress, SilentProgress
from engine.private_folder import private_folder


@contextmanager
def model_lock(folder: Path, key: str, name: str, progress: Progress | None = None) -> Iterator[None]:
    """Hold the lock of a model while the body runs; wait for whoever holds it, and say so.

    `folder` is that of all models, `key` a file name that is the model's own, `name` what people call it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(private_folder(folder / ".locks") / f"{key}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        (progress or SilentProgress()).say(f"Waiting for another ingle that is busy with {name}.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
