"""Models in the shared Hugging Face cache, under the names of their repositories, whichever tool downloaded them.

They are used without a copy. `models_dir` has a record of each model that ingle itself downloaded, and ingle removes
only those models. `app.models.repository_download` does the downloads.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from app.errors import AppError, IntegrityError, ModelNotFound
from app.models import hub_cache
from app.models.catalog import HubSource
from app.models.digests import DIGESTS, has_digest, remember_sha256
from app.models.hub_cache import ListedFile
from app.models.lock import model_lock
from app.models.repository import DESCRIPTIONS, ModelFiles, RepositoryName, choose, matching_models, models_among
from app.models.stored_model import Removal, StoredModel, stored_model
from app.models.transfer.incoming import Incoming, arrived, discard, receive
from app.progress import Progress
from app.whole_file import write_whole
from engine.private_folder import private_folder
from quant.errors import ModelFileError

_PULLED = ".pulled"


@dataclass(frozen=True, slots=True)
class PullRecord:
    """The record of a model that ingle downloaded, or is downloading, under the name of its repository."""

    revision: str
    files: tuple[str, ...]
    stored_at: str  # ISO 8601 in UTC
    license: str  # according to the Hub; empty: not stated
    size: int | None = None  # bytes of all files; None: an earlier version wrote the record, without the size


@dataclass(frozen=True, slots=True)
class UnfinishedPull:
    """An unfinished download."""

    name: str
    arrived: int  # bytes
    size: int | None  # bytes of all files


class HubModels:
    """The models in the cache. Safe to use from several processes at once."""

    def __init__(self, cache: Path, models_dir: Path) -> None:
        self._cache = cache
        self._models_dir = models_dir

    def find(self, name: RepositoryName) -> StoredModel | None:
        """Return the model with that name if it is complete. The name of the result includes its quantization.

        Raises ModelNotFound if the name is ambiguous.
        """
        folder = hub_cache.snapshot(self._cache, name.repo)
        names = hub_cache.files(folder) if folder else []
        if folder is None or not matching_models(name, models_among(names)):
            return None
        return self._stored(name.repo, folder, choose(name, names))

    def entries(self) -> Iterator[StoredModel]:
        """Yield all complete models, by name."""
        for repo in hub_cache.repositories(self._cache):
            if folder := hub_cache.snapshot(self._cache, repo):
                for model in models_among(hub_cache.files(folder)):
                    if stored := self._stored(repo, folder, model):
                        yield stored

    def pulled(self, name: RepositoryName) -> PullRecord | None:
        """Return the record of the model that ingle downloaded under this name."""
        try:
            content = json.loads(self._record_path(name).read_bytes())
            files, size = tuple(content["files"]), content.get("size")
            return PullRecord(content["revision"], files, content["stored_at"], content["license"], size and int(size))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def unfinished(self) -> Iterator[UnfinishedPull]:
        """Yield the unfinished downloads of ingle, by name."""
        for record in sorted((self._models_dir / _PULLED).glob("*.json")):
            name = _name_in(record)
            if name and (pulled := self.pulled(name)) and self._lacks_a_file(name.repo, pulled):
                arrived = hub_cache.arrived(self._cache, name.repo, pulled.revision, pulled.files)
                yield UnfinishedPull(str(name), arrived, pulled.size)

    def _lacks_a_file(self, repo: str, pulled: PullRecord) -> bool:
        folder = hub_cache.snapshot_folder(self._cache, repo, pulled.revision)
        return not all((folder / file).is_file() for file in pulled.files)

    def lock(self, name: RepositoryName, progress: Progress | None = None) -> AbstractContextManager[None]:
        """Keep other processes from downloading or removing models of the same repository meanwhile."""
        return model_lock(self._models_dir, self._record_path(RepositoryName(name.repo)).stem, str(name), progress)

    def path(self, file: ListedFile) -> Path:
        """Return the path of a file, whether or not it exists."""
        return hub_cache.snapshot_path(self._cache, file.source)

    def has(self, file: ListedFile, progress: Progress) -> bool:
        """Whether the file is stored with the right bytes. If another commit has the same bytes, links them to this
        file.
        """
        path, blob = self.path(file), self._blob(file)
        if path.is_file():
            return path.stat().st_size == file.size and self._has_digest(path, file.digest, progress)
        if not (blob.is_file() and self._has_digest(blob, file.digest, progress)):
            return False
        hub_cache.link(self._cache, file.source, blob)
        self.remember_digest(file)
        return True

    def verify(self, stored: StoredModel, progress: Progress) -> None:
        """Raise IntegrityError if a file of a stored model does not match its digest.

        Each large file is read once, and again only after it has changed.
        """
        described = (stored.path / name for name in DESCRIPTIONS) if stored.is_folder else ()
        for path in (*stored.weights(), *(path for path in described if path.is_file())):
            digest = hub_cache.expected_digest(path)
            if digest and not self._has_digest(path, digest, progress):
                raise IntegrityError(f"{path} is damaged: it does not match the digest of {stored.name}")

    def _has_digest(self, path: Path, digest: str, progress: Progress) -> bool:
        return has_digest(path, digest, self._models_dir / DIGESTS, progress)

    def missing(self, file: ListedFile) -> int:
        """Return how many bytes of a file that is not stored are still to be downloaded."""
        return max(0, file.size - arrived(self._blob(file)))

    def discard_partial(self, file: ListedFile) -> None:
        """Remove the partial file of an interrupted download."""
        if arrived(self._blob(file)):
            with self.lock(RepositoryName(file.source.repo)):
                discard(self._blob(file))

    @contextmanager
    def receiving(self, file: ListedFile) -> Iterator[Incoming]:
        """Store a file as the body writes it: verified and complete, or not at all. The caller must hold the lock.

        If the body raises, for example because the connection broke, the part that has arrived is kept for the next
        attempt.
        """
        blob = self._blob(file)
        with receive(blob, file.size, file.digest, resumable=True) as incoming:
            yield incoming
        hub_cache.link(self._cache, file.source, blob)

    def remember_digest(self, file: ListedFile) -> None:
        """Record the digest of a file that was just received and verified."""
        if file.is_sha256:
            remember_sha256(self.path(file), self._models_dir / DIGESTS, file.digest)

    def record_pull(self, name: RepositoryName, files: Sequence[ListedFile], license_name: str) -> None:
        """Record the files of a download, all of one commit.

        Call this before the download starts, so that `remove` finds every part of it.
        """
        record = {
            "name": str(name),
            "revision": files[0].source.revision,
            "files": [file.source.file for file in files],
            "stored_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "license": license_name,
            "size": sum(file.size for file in files),
        }
        private_folder(self._record_path(name).parent)
        write_whole(self._record_path(name), json.dumps(record, indent=2).encode())

    def complete(self, name: RepositoryName, revision: str) -> None:
        """Finish a download: the commit becomes `main` of the cache."""
        hub_cache.set_main(self._cache, name.repo, revision)

    def remove(self, name: RepositoryName, *, really: bool = True) -> list[Removal]:
        """Remove the model that ingle downloaded under this name.

        Without `really`, removes nothing and returns the removals that would be made.
        Raises AppError for a model that another tool downloaded, and ModelNotFound.
        """
        with self.lock(name):
            stored = self.find(name)
            name = (stored and RepositoryName.parse(stored.name)) or self._unfinished_name(name)
            pulled = self.pulled(name)
            if pulled is None:
                if stored:
                    raise AppError(f"{name} was not downloaded by ingle", f"hf cache rm model/{name.repo}")
                raise ModelNotFound(f"{name} is not on this machine", "ingle ls lists the stored models.")
            sources = [HubSource(name.repo, pulled.revision, file) for file in pulled.files]
            there = [source for source in sources if hub_cache.find(self._cache, source)]
            freed = hub_cache.remove(self._cache, there, really=really) if there else 0
            freed += hub_cache.remove_partials(self._cache, name.repo, really=really)
            if really:
                self._record_path(name).unlink(missing_ok=True)
        folder = hub_cache.snapshot_folder(self._cache, name.repo, pulled.revision)
        return [Removal(folder / pulled.files[0] if len(pulled.files) == 1 else folder, freed, shared=True)]

    def _unfinished_name(self, name: RepositoryName) -> RepositoryName:
        """Return the name, with the quantization if exactly one download of it is unfinished."""
        names = [pull.name for pull in self.unfinished() if pull.name.startswith(f"{name}:")]
        whole = RepositoryName.parse(names[0]) if len(names) == 1 and not self.pulled(name) else None
        return whole or name

    def _stored(self, repo: str, folder: Path, model: ModelFiles) -> StoredModel | None:
        """Return the stored model, or None if a part is missing."""
        if not model.is_whole:
            return None
        name = RepositoryName(repo, model.quantization or None)
        pulled = self.pulled(name)
        path, stored_at = folder / model.files[0] if model.is_gguf else folder, pulled.stored_at if pulled else None
        try:
            return stored_model(str(name), path, f"Hugging Face Hub ({repo})", stored_at)
        except ModelFileError:
            return None

    def _blob(self, file: ListedFile) -> Path:
        return hub_cache.blob_path(self._cache, file.source, file.digest)

    def _record_path(self, name: RepositoryName) -> Path:
        return self._models_dir / _PULLED / f"{str(name).replace('/', '--').replace(':', '--')}.json"


def _name_in(record: Path) -> RepositoryName | None:
    """Return the name in a record; None if the record is invalid."""
    try:
        return RepositoryName.parse(str(json.loads(record.read_bytes())["name"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
