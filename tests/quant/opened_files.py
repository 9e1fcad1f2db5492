"""Report the files that code opens, and those that it leaves open."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def opened_files() -> Iterator[list[str]]:
    """Yield a list that receives the path of each file opened inside the block, from audit events."""
    seen: list[str] = []
    listening = True

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if listening and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            seen.append(os.fsdecode(arguments[0]))

    sys.addaudithook(hook)  # audit hooks cannot be removed
    try:
        yield seen
    finally:
        listening = False


def open_descriptors(folder: Path) -> list[str]:
    """Return the paths below `folder` that this process has open. Servers of other tests change the number of all."""
    paths = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, by the listing itself or another thread
            paths.append(str(descriptor.readlink()))
    return [path for path in paths if path.startswith(f"{folder}/")]
