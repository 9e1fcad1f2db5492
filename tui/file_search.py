"""Finds files to attach, with limits on the time and on the number of files."""

import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

LIMIT = 5_000  # maximum number of files
SECONDS = 2.0  # time limit of git, and of a search through folders
_BYTES = 1_000_000  # maximum size of git's output in bytes


@dataclass(frozen=True, slots=True)
class Files:
    """Paths of files. `is_cut`: a limit was reached, and files are missing."""

    names: list[str]
    is_cut: bool = False


def find_files(typed: str, folder: Path) -> Files:
    """Return the paths of visible files below `folder`. If `typed` names a folder, return its entries instead.

    Inside a git repository, ignored files are omitted.
    """
    if typed:
        return _entries(typed)
    found = _listed_by_git(folder) or _walk(folder)
    names = sorted(found.names, key=lambda name: (name.count("/"), name))
    return Files(names[:LIMIT], found.is_cut or len(names) > LIMIT)


def _entries(folder: str) -> Files:
    """Return the entries of a folder, the hidden ones last. Folders end with a slash."""
    try:
        with os.scandir(Path(folder).expanduser()) as entries:
            found = list(islice(entries, LIMIT + 1))
    except (OSError, RuntimeError):  # expanduser raises RuntimeError for unknown users
        return Files([])
    names = sorted(f"{one.name}{'/' if _is_folder(one) else ''}" for one in found[:LIMIT])
    return Files([f"{folder}{name}" for name in sorted(names, key=_is_hidden)], len(found) > LIMIT)


def _listed_by_git(folder: Path) -> Files | None:
    """Return the visible files that git does not ignore, or None if there are none or git does not work."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        git = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    started = time.monotonic()
    with git:
        killer = threading.Timer(SECONDS, git.kill)
        killer.start()
        output = git.stdout.read(_BYTES) if git.stdout else b""
        git.kill()
        killer.cancel()
    is_cut = len(output) == _BYTES or time.monotonic() - started >= SECONDS
    names = [name.decode(errors="replace") for name in output.split(b"\0")[:-1]]
    visible = [name for name in names if not _is_hidden(name)]
    return Files(visible, is_cut) if visible else None


def _walk(folder: Path) -> Files:
    """Return the visible files below a folder, those of the upper folders first."""
    ends = time.monotonic() + SECONDS
    names: list[str] = []
    for name in _below(folder):
        if len(names) == LIMIT or time.monotonic() > ends:
            return Files(names, is_cut=True)
        if name:
            names.append(name)
    return Files(names)


def _below(folder: Path) -> Iterator[str]:
    """Yield the paths of visible files, and "" for each other entry, so that the caller can stop in between.

    Does not follow links to folders, which can be circular.
    """
    waiting = deque([""])
    while waiting:
        inside = waiting.popleft()
        try:
            with os.scandir(folder / inside) as entries:
                for one in entries:
                    is_visible, is_folder = not _is_hidden(one.name), _is_folder(one)
                    yield f"{inside}{one.name}" if is_visible and not is_folder else ""
                    if is_visible and is_folder and not one.is_symlink():
                        waiting.append(f"{inside}{one.name}/")
        except OSError:  # the folder cannot be read, or was removed
            yield ""


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or "/." in name
