"""Record the files that code opens, from the interpreter's audit events."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def opened_files() -> Iterator[list[str]]:
    """Yield a list that receives the path of every file opened inside the block."""
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
