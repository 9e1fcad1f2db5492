"""Our corner of the ordinary Hugging Face cache, which other tools share: find, link and remove one file.

The layout is that of huggingface_hub: `models--ORG--REPO/blobs/<sha256>` holds the bytes, and
`snapshots/<commit>/<file>` is a link to them. Nothing here touches the network.
"""

import os
from pathlib import Path

from app.catalog import HubSource
from app.errors import AppError


def blob_path(cache: Path, source: HubSource, sha256: str) -> Path:
    """Where the bytes of a file belong. Large files are named by their sha256."""
    return _repo_folder(cache, source) / "blobs" / sha256


def find(cache: Path, source: HubSource) -> Path | None:
    """The file as another tool or we have stored it, or None."""
    path = _snapshot_path(cache, source)
    return path if path.is_file() else None


def link(cache: Path, source: HubSource, blob: Path) -> Path:
    """Make a stored blob visible under its file name, and return that path."""
    path = _snapshot_path(cache, source)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:  # no links on this system: huggingface_hub keeps the file itself in the snapshot then
        os.replace(blob, path)
    return path


def remove(cache: Path, source: HubSource) -> int:
    """Remove the file, and its bytes unless another revision shares them. Returns the bytes freed."""
    from huggingface_hub import scan_cache_dir

    path = _snapshot_path(cache.resolve(), source)
    content = scan_cache_dir(cache)
    files = [
        file
        for repo in content.repos
        for revision in repo.revisions
        for file in revision.files
        if file.file_path == path
    ]
    if not files:
        raise AppError(
            f"huggingface_hub cannot make sense of its cache around {path}", f"hf cache rm model/{source.repo}"
        )
    strategy = content.delete_files(*files)
    strategy.execute()
    return strategy.expected_freed_size


def _repo_folder(cache: Path, source: HubSource) -> Path:
    return cache / f"models--{source.repo.replace('/', '--')}"


def _snapshot_path(cache: Path, source: HubSource) -> Path:
    return _repo_folder(cache, source) / "snapshots" / source.revision / source.file
