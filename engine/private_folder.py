"""Folders that only the user who created them can access."""

import contextlib
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Create `path` and its missing parents for this user only, regardless of the umask. Raises OSError."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)
                folder.chmod(0o700)
    return path
