"""A lock for each model, so that two processes do not download, write, or remove the same model at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.progress import Progress, SilentProgress
from engine.private_folder import private_folder


@contextmanager
def model_lock(folder: Path, key: str, name: str, progress: Progress | None = None) -> Iterator[None]:
    """Hold the lock of a model while the body runs. If another process holds it, print a line and wait.

    `folder` is the models folder, `key` a file name unique to the model, and `name` its name for messages.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(private_folder(folder / ".locks") / f"{key}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        (progress or SilentProgress()).say(f"Waiting for another ingle process that uses {name}.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
