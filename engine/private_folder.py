"""Folders that belong to one user alone.

Refuses to know what is kept in them.
"""

import contextlib
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Create `path` and its missing parents for this user alone, whatever the umask. Raises OSError."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)
                folder.chmod(0o700)
    return path
