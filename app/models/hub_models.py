"""The models of the shared Hugging Face cache, by the name of their repository, whoever has put them there.

They are used in place. What ingle itself has fetched it keeps a record of, in `models_dir`, and that is all it will
ever remove. Refuses to know the network (`app.models.repository_download`).
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
    """What was fetched by the name of a repository, or is on its way."""

    revision: str
    files: tuple[str, ...]
    stored_at: str  # ISO 8601 in UTC
    license: str  # as the Hub has it; empty: it does not say
    size: int | None = None  # bytes of all files; None: whoever fetched it kept no note of that


@dataclass(frozen=True, slots=True)
class UnfinishedPull:
    """What was begun to be fetched."""

    name: str
    arrived: int  # bytes
    size: int | None  # of all of it


class HubModels:
    """Every model in the cache. Safe to use from several processes at once."""

    def __init__(self, cache: Path, models_dir: Path) -> None:
        self._cache = cache
        self._models_dir = models_dir

    def find(self, name: RepositoryName) -> StoredModel | None:
        """The model of that name, if all of it is there, with its quantization in its own name.

        Raises ModelNotFound where the name could mean several.
        """
        folder = hub_cache.snapshot(self._cache, name.repo)
        names = hub_cache.files(folder) if folder else []
        if folder is None or not matching_models(name, models_among(names)):
            return None
        return self._stored(name.repo, folder, choose(name, names))

    def entries(self) -> Iterator[StoredModel]:
        """All models that are whole, by name."""
        for repo in hub_cache.repositories(self._cache):
            if folder := hub_cache.snapshot(self._cache, repo):
                for model in models_among(hub_cache.files(folder)):
                    if stored := self._stored(repo, folder, model):
                        yield stored

    def pulled(self, name: RepositoryName) -> PullRecord | None:
        """What ingle has fetched by this name."""
        try:
            content = json.loads(self._record_path(name).read_bytes())
            files, size = tuple(content["files"]), content.get("size")
            return PullRecord(content["revision"], files, content["stored_at"], content["license"], size and int(size))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def unfinished(self) -> Iterator[UnfinishedPull]:
        """What ingle has begun to fetch and has not ended, by name."""
        for record in sorted((self._models_dir / _PULLED).glob("*.json")):
            name = _name_in(record)
            if name and (pulled := self.pulled(name)) and self._lacks_a_file(name.repo, pulled):
                arrived = hub_cache.arrived(self._cache, name.repo, pulled.revision, pulled.files)
                yield UnfinishedPull(str(name), arrived, pulled.size)

    def _lacks_a_file(self, repo: str, pulled: PullRecord) -> bool:
        folder = hub_cache.snapshot_folder(self._cache, repo, pulled.revision)
        return not all((folder / file).is_file() for file in pulled.files)

    def lock(self, name: RepositoryName, progress: Progress | None = None) -> AbstractContextManager[None]:
        """Keep other processes from pulling or removing models of the same repository meanwhile."""
        return model_lock(self._models_dir, self._record_path(RepositoryName(name.repo)).stem, str(name), progress)

    def path(self, file: ListedFile) -> Path:
        """Where a file is, or will be."""
        return hub_cache.snapshot_path(self._cache, file.source)

    def has(self, file: ListedFile, progress: Progress) -> bool:
        """Whether the file is there, with the right bytes; those that another commit has too are made its own."""
        path, blob = self.path(file), self._blob(file)
        if path.is_file():
            return path.stat().st_size == file.size and self._has_digest(path, file.digest, progress)
        if not (blob.is_file() and self._has_digest(blob, file.digest, progress)):
            return False
        hub_cache.link(self._cache, file.source, blob)
        self.remember_digest(file)
        return True

    def verify(self, stored: StoredModel, progress: Progress) -> None:
        """Raise IntegrityError where a file of a model in the cache has other bytes than it is named for.

        Each large file is read once, and again only when it has changed.
        """
        described = (stored.path / name for name in DESCRIPTIONS) if stored.is_folder else ()
        for path in (*stored.weights(), *(path for path in described if path.is_file())):
            digest = hub_cache.expected_digest(path)
            if digest and not self._has_digest(path, digest, progress):
                raise IntegrityError(f"{path} is damaged: its bytes are not those of {stored.name}")

    def _has_digest(self, path: Path, digest: str, progress: Progress) -> bool:
        return has_digest(path, digest, self._models_dir / DIGESTS, progress)

    def missing(self, file: ListedFile) -> int:
        """How many bytes of a file, which is not there, have to be fetched yet."""
        return max(0, file.size - arrived(self._blob(file)))

    def discard_partial(self, file: ListedFile) -> None:
        """Remove what an interrupted download has left of a file."""
        if arrived(self._blob(file)):
            with self.lock(RepositoryName(file.source.repo)):
                discard(self._blob(file))

    @contextmanager
    def receiving(self, file: ListedFile) -> Iterator[Incoming]:
        """Store a file as the body writes it: verified and whole, or not at all. Hold the lock.

        What has arrived before the body raised, say because the connection broke, is there for the next time.
        """
        blob = self._blob(file)
        with receive(blob, file.size, file.digest, resumable=True) as incoming:
            yield incoming
        hub_cache.link(self._cache, file.source, blob)

    def remember_digest(self, file: ListedFile) -> None:
        """Record what a file that was just received has been verified to hold."""
        if file.is_sha256:
            remember_sha256(self.path(file), self._models_dir / DIGESTS, file.digest)

    def record_pull(self, name: RepositoryName, files: Sequence[ListedFile], licence: str) -> None:
        """Record what is fetched by this name, all of one commit, before it is: so that `remove` finds it, whatever
        has arrived of it."""
        record = {
            "name": str(name),
            "revision": files[0].source.revision,
            "files": [file.source.file for file in files],
            "stored_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "license": licence,
            "size": sum(file.size for file in files),
        }
        private_folder(self._record_path(name).parent)
        write_whole(self._record_path(name), json.dumps(record, indent=2).encode())

    def complete(self, name: RepositoryName, revision: str) -> None:
        """All of it has arrived: the cache calls that commit `main` from now on."""
        hub_cache.set_main(self._cache, name.repo, revision)

    def remove(self, name: RepositoryName, *, really: bool = True) -> list[Removal]:
        """Remove what was pulled by this name, or tell what that would free. Raises AppError for what others have put
        there, ModelNotFound."""
        with self.lock(name):
            stored = self.find(name)
            name = (stored and RepositoryName.parse(stored.name)) or self._begun(name)
            pulled = self.pulled(name)
            if pulled is None:
                if stored:
                    raise AppError(f"{name} was not stored by ingle", f"hf cache rm model/{name.repo}")
                raise ModelNotFound(f"{name} is not on this machine", "ingle ls shows what is.")
            sources = [HubSource(name.repo, pulled.revision, file) for file in pulled.files]
            there = [source for source in sources if hub_cache.find(self._cache, source)]
            freed = hub_cache.remove(self._cache, there, really=really) if there else 0
            freed += hub_cache.remove_partials(self._cache, name.repo, really=really)
            if really:
                self._record_path(name).unlink(missing_ok=True)
        folder = hub_cache.snapshot_folder(self._cache, name.repo, pulled.revision)
        return [Removal(folder / pulled.files[0] if len(pulled.files) == 1 else folder, freed, shared=True)]

    def _begun(self, name: RepositoryName) -> RepositoryName:
        """The name with the quantization of what was begun to be fetched by it; where that is not one, as it is."""
        names = [begun.name for begun in self.unfinished() if begun.name.startswith(f"{name}:")]
        whole = RepositoryName.parse(names[0]) if len(names) == 1 and not self.pulled(name) else None
        return whole or name

    def _stored(self, repo: str, folder: Path, model: ModelFiles) -> StoredModel | None:
        """None where a part of the model is missing."""
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
    """Of what a record is; None where it makes no sense."""
    try:
        return RepositoryName.parse(str(json.loads(record.read_bytes())["name"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
