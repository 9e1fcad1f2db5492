"""Lists of the installed models and of the catalog for the screens. Reads files, and does not use the network."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

from app.models.catalog import CatalogEntry
from app.models.decode_rate import expected_speed, is_fluent
from app.models.details import known_license
from app.models.families import KnownModel, active_bytes
from app.models.machine_memory import is_likely_to_fit
from app.models.repository import PREFERRED
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from app.models.transfer.download_queue import Download, DownloadState, downloads, is_same_model
from quant.errors import InglenookError
from tui.engine_types import ModelInfo


def installed_models(store: ModelStore, loaded: str, fetching: str) -> list[ModelInfo]:
    """Return the installed models, followed by unfinished downloads.

    `loaded` is the name of the loaded model. `fetching` is the model that the engine downloads, or "".
    """
    stored = store.entries()
    under_way = downloads(store.hub_models, store.models_dir)
    here = {one.name for one in stored}
    missing = (entry for entry in store.catalog if entry.name not in here)
    unfinished = [_of_catalog(entry, store, under_way, fetching, None) for entry in missing]
    unfinished += [
        ModelInfo(one.name, size=one.total, arrived=one.done) for one in under_way if one.state is DownloadState.STOPPED
    ]
    if fetching and not any(is_same_model(name, fetching) for name in here | {one.name for one in unfinished}):
        unfinished.append(ModelInfo(fetching, fetching=True))
    return [
        *(_stored(one, store, loaded) for one in stored),
        *(one for one in unfinished if one.arrived or one.fetching),
    ]


def catalog_models(store: ModelStore, loaded: str, fetching: str, memory: int | None) -> Iterator[ModelInfo]:
    """Yield all models with a short name. Sizes, and whether a model fits, are estimates unless it is installed.

    `memory`: bytes available to a model; None if unknown.
    """
    here = {stored.name: stored for stored in store.entries()}
    under_way = downloads(store.hub_models, store.models_dir)
    for entry in store.catalog:
        stored = here.get(entry.name)
        yield (
            _of_catalog(entry, store, under_way, fetching, memory) if stored is None else _stored(stored, store, loaded)
        )
    for known in store.families:
        stored = _found(known, store)
        if stored is None:
            yield _of_family(known, under_way, fetching, memory)
        else:
            info = _stored(stored, store, loaded)
            yield replace(info, name=known.name, license=info.license or known.license)


def with_speeds(listed: Iterable[ModelInfo], store: ModelStore, rate: float) -> list[ModelInfo]:
    """Add the expected speeds. `rate`: the decode rate of this machine; 0: not measured."""
    return [replace(one, speed=None if one.fits is False else _speed(one, store, rate)) for one in listed]


def _speed(model: ModelInfo, store: ModelStore, rate: float) -> float | None:
    known = store.families.models.get(model.name)
    name = model.name if known is None else known.repository.repo
    return expected_speed(rate, active_bytes(name, model.size or 0))


def mark_recommended(listed: Sequence[ModelInfo], store: ModelStore) -> Sequence[ModelInfo]:
    """Mark the best recommended model that fits and is not expected to be slow."""
    fitting = {one.name for one in listed if (one.fits or one.installed) and is_fluent(one.speed)}
    best = next((known.name for known in store.families.recommended if known.name in fitting), "")
    return [replace(one, is_recommended=one.name == best) for one in listed]


def without_embedding_models(models: Iterable[ModelInfo], store: ModelStore) -> list[ModelInfo]:
    """Return the models without those that are known to return embeddings instead of text."""
    others = [known for known in store.families if known.kind == "embedding"]
    return [one for one in models if not any(one.name == known.name or _is_of(one.name, known) for known in others)]


def path_model(path: str, loaded: str) -> ModelInfo:
    """Return an entry for a model that the user named by its path. `loaded` is the name of the loaded model."""
    model = ModelInfo(path, installed=True, loaded=path == loaded, is_own=True)
    with suppress(OSError):
        return replace(model, size=Path(path).stat().st_size)
    return model


def named_model(name: str, store: ModelStore, loaded: str, fetching: str, memory: int | None) -> ModelInfo:
    """Return the entry of a model from the lists. If no list has it, the entry holds only the name."""
    known = store.known_name(name)
    listed = chain(installed_models(store, loaded, fetching), catalog_models(store, loaded, fetching, memory))
    for model in listed:
        other = store.known_name(model.name)
        if name == model.name or (known and known in (other, f"{other}:{model.quantization}")):
            return replace(model, name=name)
    with suppress(InglenookError):
        store.resolve(name)  # finds models of other tools, from the web, and at a path
        return ModelInfo(name, installed=True)
    return ModelInfo(name)


def _stored(stored: StoredModel, store: ModelStore, loaded: str) -> ModelInfo:
    return ModelInfo(
        name=stored.name,
        quantization=stored.quantization or "",
        size=stored.size,
        license=known_license(stored, store.catalog, store.hub_models) or "",
        installed=True,
        loaded=stored.name == loaded,
    )


def _of_catalog(
    entry: CatalogEntry, store: ModelStore, under_way: list[Download], fetching: str, memory: int | None
) -> ModelInfo:
    is_left = all(one.name != entry.name for one in under_way)
    return ModelInfo(
        name=entry.name,
        quantization=entry.quantization,
        size=entry.size,
        license=entry.license,
        fits=_fits(entry.size, memory),
        arrived=store.arrived(entry) or None if is_left else None,
        fetching=fetching == entry.name,
    )


def _of_family(known: KnownModel, under_way: list[Download], fetching: str, memory: int | None) -> ModelInfo:
    left = (one for one in under_way if one.state is DownloadState.STOPPED and _is_of(one.name, known))
    unfinished = next(left, None)
    size = unfinished.total if unfinished is not None else None
    is_gguf = known.repository.repo.lower().endswith("gguf")
    return ModelInfo(
        name=known.name,
        quantization=PREFERRED[0] if is_gguf else "",
        size=size or known.usual_size,
        license=known.license,
        fits=_fits(size or known.usual_size, memory),
        is_estimate=size is None,
        arrived=None if unfinished is None else unfinished.done,
        fetching=bool(fetching) and _is_of(fetching, known),
    )


def _is_of(name: str, known: KnownModel) -> bool:
    return name.partition(":")[0] == known.repository.repo


def _found(known: KnownModel, store: ModelStore) -> StoredModel | None:
    with suppress(InglenookError):  # another tool stored several files for this model, or damaged ones
        return store.hub_models.find(known.repository)
    return None


def _fits(size: int, memory: int | None) -> bool | None:
    return None if memory is None else is_likely_to_fit(size, memory)
