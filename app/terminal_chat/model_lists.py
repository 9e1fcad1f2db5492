"""The models that are here and those of the catalog, as the screens list them. Looks at files, and at no network."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from app.models.catalog import CatalogEntry
from app.models.details import told_license
from app.models.download_queue import Fetch, FetchState, fetches
from app.models.families import KnownModel
from app.models.machine_memory import is_likely_to_fit
from app.models.repository import PREFERRED
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from quant.errors import InglenookError
from tui.engine_nouns import Model


def installed_models(store: ModelStore, loaded: str) -> list[Model]:
    """What is stored, then what was begun to be fetched. `loaded` is the name of the model that answers."""
    stored = [_stored(one, store, loaded) for one in store.entries()]
    return [*stored, *(Model(one.name, arrived=one.done) for one in _paused(store))]


def catalog_models(store: ModelStore, loaded: str, memory: int | None) -> Iterator[Model]:
    """What has a short name, by it. Sizes and fits of families are estimates where they are not here; `memory` is what
    a model would find, None where nobody knows."""
    here = {stored.name: stored for stored in store.entries()}
    paused = list(_paused(store))
    for entry in store.catalog:
        stored = here.get(entry.name)
        yield _of_catalog(entry, memory) if stored is None else _stored(stored, store, loaded)
    for known in store.families:
        stored = _found(known, store)
        if stored is None:
            yield _of_family(known, memory, paused)
        else:
            told = _stored(stored, store, loaded)
            yield replace(told, name=known.name, license=told.license or known.license)


def _stored(stored: StoredModel, store: ModelStore, loaded: str) -> Model:
    return Model(
        name=stored.name,
        quantization=stored.quantization or "",
        size=stored.size,
        license=told_license(stored, store.catalog, store.hub_models) or "",
        installed=True,
        loaded=stored.name == loaded,
    )


def _of_catalog(entry: CatalogEntry, memory: int | None) -> Model:
    return Model(entry.name, entry.quantization, entry.size, entry.license, _fits(entry.size, memory))


def _of_family(known: KnownModel, memory: int | None, paused: list[Fetch]) -> Model:
    is_gguf = known.repository.repo.lower().endswith("gguf")
    return Model(
        name=known.name,
        quantization=PREFERRED[0] if is_gguf else "",
        size=known.usual_size,
        license=known.license,
        fits=_fits(known.usual_size, memory),
        is_estimate=True,
        arrived=next((one.done for one in paused if one.name.partition(":")[0] == known.repository.repo), None),
    )


def _found(known: KnownModel, store: ModelStore) -> StoredModel | None:
    with suppress(InglenookError):  # others have put several there, or one that is damaged
        return store.hub_models.find(known.repository)
    return None


def _paused(store: ModelStore) -> Iterator[Fetch]:
    return (one for one in fetches(store.hub_models, store.models_dir) if one.state is FetchState.STOPPED)


def _fits(size: int, memory: int | None) -> bool | None:
    return None if memory is None else is_likely_to_fit(size, memory)
