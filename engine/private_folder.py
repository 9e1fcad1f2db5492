"""Folders that belong to one user alone.

Refuses to know what is kept in them.
"""

import contextlib
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Create `path` and its missing parents for this user alone, whatever the umask. Raises OSError."""
    for place in (*reversed(path.parents), path):
        if not place.exists():
            with contextlib.suppress(FileExistsError):
                place.mkdir(0o700)
                place.chmod(0o700)
    return path
