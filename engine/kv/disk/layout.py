"""Where run files lie in the root folder: a folder for each model, and in it one for each first byte of a key.

The file system is the index, so all who look for files agree on it here. Refuses to know what is in a file.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from engine.kv.blocks import BlockKey

ANY_NAME = re.compile(".*", re.DOTALL)


def stem(group: int, first_key: BlockKey) -> str:
    """What the names of a segment's files begin with, up to the last dash."""
    return f"{first_key[:16].hex()}-{group}"


def stem_of(name: str) -> str:
    """The same, of a file's name."""
    return name.rpartition("-")[0]


def bucket(stem: str) -> str:
    """The name of the folder that these files lie in."""
    return stem[:2]


def folders(parent: Path, name: re.Pattern[str] = ANY_NAME) -> Iterator[Path]:
    """The folders in a folder, those that can be seen, by the whole of their names."""
    for entry in entries(parent):
        with contextlib.suppress(OSError):
            if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def entries(folder: Path) -> list["os.DirEntry[str]"]:
    """What is in a folder; nothing where it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        return list(found)
    return []
