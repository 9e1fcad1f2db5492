"""Finds files to attach, with limits on the time and on the number of files."""

import os
import subprocess
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

LIMIT = 5_000  # maximum number of files
_BYTES = 1_000_000  # maximum size of git's output in bytes
_SECONDS = 2.0


def find_files(typed: str, folder: Path) -> list[str]:
    """Return the paths of visible files. If `typed` names a folder, return its entries, else all files below `folder`.

    Inside a git repository, ignored files are omitted.
    """
    if typed.startswith(("/", "~", "./", "../")):
        return _entries(typed)
    names = _listed_by_git(folder)
    if names is None:
        names = list(islice(_walk(folder), LIMIT))
    return sorted(names, key=lambda name: (name.count("/"), name))[:LIMIT]


def _entries(typed: str) -> list[str]:
    """Return the entries of the folder in `typed`, which ends at the last slash. Folders end with a slash."""
    shown, _, start = typed.rpartition("/")
    try:
        with os.scandir(Path(f"{shown}/").expanduser()) as entries:
            visible = [one for one in islice(entries, LIMIT) if start.startswith(".") or not one.name.startswith(".")]
            return sorted(f"{shown}/{one.name}{'/' if one.is_dir() else ''}" for one in visible)
    except (OSError, RuntimeError):  # expanduser raises RuntimeError for unknown users
        return []


def _listed_by_git(folder: Path) -> list[str] | None:
    """Return the files that git does not ignore, or None outside a repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        git = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    with git:
        killer = threading.Timer(_SECONDS, git.kill)
        killer.start()
        output = git.stdout.read(_BYTES) if git.stdout else b""
        git.kill()
        killer.cancel()
        names = [name.decode(errors="replace") for name in output.split(b"\0")[:-1]]
    return [name for name in names if not _is_hidden(name)] or None


def _walk(folder: Path) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(root, name), folder)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or "/." in name
