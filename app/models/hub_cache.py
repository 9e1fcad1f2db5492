"""The ordinary Hugging Face cache, which other tools share: what is there, and how to find, link and remove files.

The layout is that of huggingface_hub: `models--ORG--REPO/blobs/<digest>` holds the bytes, `snapshots/<commit>/<file>`
is a link to them, and `refs/main` has the commit that was fetched last. Nothing here touches the network.

huggingface_hub removes files, since it knows which bytes other revisions share. Its scan of the cache is not used: it
takes twice the time of ours, and its import another 0.1 s.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.errors import AppError
from app.models.catalog import HubSource
from app.whole_file import PARTIAL, write_whole

MAX_FILES = 20_000  # of one repository
_FOLDER = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
_COMMIT = re.compile("[0-9a-f]{40}")
DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # sha1 of git, or sha256


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
    """Where the bytes of a file belong. Large files are named by their sha256."""
    return _repo_folder(cache, source.repo) / "blobs" / sha256


def find(cache: Path, source: HubSource) -> Path | None:
    """The file as another tool or we have stored it, or None."""
    path = snapshot_path(cache, source)
    return path if path.is_file() else None


def expected_digest(path: Path) -> str | None:
    """The digest, in hex, that the bytes of a snapshot's file are named by; None where the file itself lies there."""
    blob = Path(os.path.realpath(path))
    return blob.name if blob.parent.name == "blobs" and DIGEST.fullmatch(blob.name) else None


def link(cache: Path, source: HubSource, blob: Path) -> Path:
    """Make a stored blob visible under its file name, and return that path."""
    path = snapshot_path(cache, source)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:  # no links on this system: huggingface_hub keeps the file itself in the snapshot then
        os.replace(blob, path)
    return path


def repositories(cache: Path) -> list[str]:
    """The names of all repositories of models, sorted."""
    folders = cache.iterdir() if cache.is_dir() else ()
    found = (_FOLDER.fullmatch(folder.name) for folder in folders)
    return sorted(f"{match['owner']}/{match['name']}" for match in found if match)


def snapshot(cache: Path, repo: str) -> Path | None:
    """The folder of the commit that was fetched last; None where there is none."""
    folder = _repo_folder(cache, repo)
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
        newest = folder / "snapshots" / commit if _COMMIT.fullmatch(commit) else None
    except (OSError, UnicodeDecodeError):  # fetched by the name of a commit, as the catalog's models are
        commits = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
        newest = max(commits, key=lambda path: path.stat().st_mtime, default=None)
    return newest if newest and newest.is_dir() else None


def set_main(cache: Path, repo: str, revision: str) -> None:
    """Let a commit be the one that was fetched last."""
    ref = _repo_folder(cache, repo) / "refs" / "main"
    ref.parent.mkdir(parents=True, exist_ok=True)
    write_whole(ref, revision.encode())


def files(snapshot: Path) -> list[str]:
    """The names of a snapshot's files, those in folders with a path in front."""
    found: list[str] = []
    for folder, _, names in os.walk(snapshot):
        found += (Path(folder, name).relative_to(snapshot).as_posix() for name in names)
        if len(found) > MAX_FILES:
            break
    return [name for name in found if (snapshot / name).is_file()]


def remove(cache: Path, sources: Sequence[HubSource], *, really: bool = True) -> int:
    """Remove files, and their bytes unless another revision shares them. Returns the bytes freed; not `really`: those
    that it would free."""
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
            f"huggingface_hub cannot make sense of its cache around {min(paths)}",
            f"hf cache rm model/{sources[0].repo}",
        )
    strategy = content.delete_files(*found)
    if really:
        strategy.execute()
    return strategy.expected_freed_size


def arrived(cache: Path, repo: str, revision: str, names: Sequence[str]) -> int:
    """Bytes of the files of a commit that are there, and of all that is on its way to this repository."""
    folder = snapshot_folder(cache, repo, revision)
    there = [folder / name for name in names if (folder / name).is_file()]
    return sum(path.stat().st_size for path in (*there, *_partials(cache, repo)))


def _partials(cache: Path, repo: str) -> list[Path]:
    return [*(_repo_folder(cache, repo) / "blobs").glob(f"*{PARTIAL}")]


def remove_partials(cache: Path, repo: str, *, really: bool = True) -> int:
    """Remove what our interrupted downloads have left. Returns the bytes freed. Hold the lock of the repository."""
    freed = 0
    for path in _partials(cache, repo):
        freed += path.stat().st_size
        if really:
            path.unlink()
    return freed


def _repo_folder(cache: Path, repo: str) -> Path:
    return cache / f"models--{repo.replace('/', '--')}"


def snapshot_path(cache: Path, source: HubSource) -> Path:
    """Where a file is seen under its own name, if it is there."""
    return snapshot_folder(cache, source.repo, source.revision) / source.file


def snapshot_folder(cache: Path, repo: str, revision: str) -> Path:
    """The folder of one commit, if it is there."""
    return _repo_folder(cache, repo) / "snapshots" / revision
