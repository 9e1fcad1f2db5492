"""The Hugging Face cache, which other tools share: find, link, and remove files.

The layout is that of huggingface_hub: `models--ORG--REPO/blobs/<digest>` holds the bytes, `snapshots/<commit>/<file>`
is a link to them, and `refs/main` has the commit that was downloaded last. This module does not use the network.

Files are removed through huggingface_hub, which knows the bytes that other revisions share. Files are not found through
its scan of the cache, which takes twice as long as this module, and 0.1 s to import.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.errors import AppError
from app.models.catalog import HubSource
from app.whole_file import PARTIAL, write_whole

MAX_FILES = 20_000  # limit of the files of one repository
_FOLDER = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
_COMMIT = re.compile("[0-9a-f]{40}")
DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # git's sha1, or sha256


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of a repository at one commit. `digest` in hex: sha256, or git's sha1 of a blob."""

    source: HubSource
    size: int
    digest: str

    @property
    def is_sha256(self) -> bool:
        return len(self.digest) == 64


def blob_path(cache: Path, source: HubSource, sha256: str) -> Path:
    """Return the path for the bytes of a file. Large files are named by their sha256."""
    return _repo_folder(cache, source.repo) / "blobs" / sha256


def find(cache: Path, source: HubSource) -> Path | None:
    """Return the path of a file that ingle or another tool has stored, or None."""
    path = snapshot_path(cache, source)
    return path if path.is_file() else None


def expected_digest(path: Path) -> str | None:
    """Return the hex digest that the bytes of a file should have; None if the file is not a link to a blob."""
    blob = Path(os.path.realpath(path))
    return blob.name if blob.parent.name == "blobs" and DIGEST.fullmatch(blob.name) else None


def link(cache: Path, source: HubSource, blob: Path) -> Path:
    """Make a stored blob visible under its file name, and return that path."""
    path = snapshot_path(cache, source)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:  # without links, huggingface_hub keeps the file itself in the snapshot
        os.replace(blob, path)
    return path


def repositories(cache: Path) -> list[str]:
    """Return the names of all model repositories, sorted."""
    folders = cache.iterdir() if cache.is_dir() else ()
    found = (_FOLDER.fullmatch(folder.name) for folder in folders)
    return sorted(f"{match['owner']}/{match['name']}" for match in found if match)


def snapshot(cache: Path, repo: str) -> Path | None:
    """Return the folder of the commit that was downloaded last; None if there is none."""
    folder = _repo_folder(cache, repo)
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
        newest = folder / "snapshots" / commit if _COMMIT.fullmatch(commit) else None
    except (OSError, UnicodeDecodeError):  # downloaded by commit, like the models of the catalog
        commits = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
        newest = max(commits, key=lambda path: path.stat().st_mtime, default=None)
    return newest if newest and newest.is_dir() else None


def set_main(cache: Path, repo: str, revision: str) -> None:
    """Make `revision` the commit that was downloaded last."""
    ref = _repo_folder(cache, repo) / "refs" / "main"
    ref.parent.mkdir(parents=True, exist_ok=True)
    write_whole(ref, revision.encode())


def files(snapshot: Path) -> list[str]:
    """Return the names of a snapshot's files, relative to the snapshot."""
    found: list[str] = []
    for folder, _, names in os.walk(snapshot):
        found += (Path(folder, name).relative_to(snapshot).as_posix() for name in names)
        if len(found) > MAX_FILES:
            break
    return [name for name in found if (snapshot / name).is_file()]


def remove(cache: Path, sources: Sequence[HubSource], *, really: bool = True) -> int:
    """Remove files, and their bytes unless another revision shares them. Returns the number of bytes freed.

    Without `really`, removes nothing and returns the number of bytes that would be freed.
    """
    from huggingface_hub import scan_cache_dir

    paths = {snapshot_path(cache.resolve(), source) for source in sources}
    content = scan_cache_dir(cache)
    found = [
        file
        for repo in content.repos
        for revision in repo.revisions
        for file in revision.files
        if file.file_path in paths
    ]
    if len(found) != len(paths):
        raise AppError(
            f"huggingface_hub does not find {min(paths)} in its cache",
            f"hf cache rm model/{sources[0].repo}",
        )
    strategy = content.delete_files(*found)
    if really:
        strategy.execute()
    return strategy.expected_freed_size


def arrived(cache: Path, repo: str, revision: str, names: Sequence[str]) -> int:
    """Return the size in bytes of the stored files of a commit and all partial downloads of the repository."""
    folder = snapshot_folder(cache, repo, revision)
    there = [folder / name for name in names if (folder / name).is_file()]
    return sum(path.stat().st_size for path in (*there, *_partials(cache, repo)))


def _partials(cache: Path, repo: str) -> list[Path]:
    return [*(_repo_folder(cache, repo) / "blobs").glob(f"*{PARTIAL}")]


def remove_partials(cache: Path, repo: str, *, really: bool = True) -> int:
    """Remove the partial files of interrupted downloads. Returns the number of bytes freed.

    The caller must hold the lock of the repository.
    """
    freed = 0
    for path in _partials(cache, repo):
        freed += path.stat().st_size
        if really:
            path.unlink()
    return freed


def _repo_folder(cache: Path, repo: str) -> Path:
    return cache / f"models--{repo.replace('/', '--')}"


def snapshot_path(cache: Path, source: HubSource) -> Path:
    """Return the path of a file under its own name, whether or not it exists."""
    return snapshot_folder(cache, source.repo, source.revision) / source.file


def snapshot_folder(cache: Path, repo: str, revision: str) -> Path:
    """Return the folder of one commit, whether or not it exists."""
    return _repo_folder(cache, repo) / "snapshots" / revision
