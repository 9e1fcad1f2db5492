"""Search the Hub for models that fit this machine's memory; without the Hub, search the models with a short name.

Whether a model fits is estimated from the size of its files, with a margin for the context: reading the headers of
every result would take minutes. `ingle fit` is exact. Responses of the Hub are treated as hostile, like any file.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import quote

from app.errors import AppError, ModelNotFound
from app.models import hub
from app.models.catalog import CatalogEntry
from app.models.families import KnownModel
from app.models.hub_listing import Listing, list_repository
from app.models.machine_memory import is_likely_to_fit, machine_memory
from app.models.reachability import check_reachable
from app.models.remote_headers import choices_of
from app.models.repository import PREFERRED, RepositoryName, choose
from app.models.store import ModelStore
from app.models.transfer.transfer import MAX_PARALLEL
from app.progress import Progress
from app.settings.settings import Settings
from quant.bounded_json import JSONProblem, parse_list

FORMATS = ("gguf", "awq", "gptq", "fp8")  # tags of repositories on the Hub
MAX_BYTES = 4 << 20
SHORT_NAMES = "these are models with a short name, and sizes are estimates"  # printed if the Hub was not searched
_MOST = 200  # results of one response that are read


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A model that was found, in the largest of the usual quantizations that fits."""

    name: str  # name under which it is downloaded
    format: str
    quantization: str | None
    size: int | None  # bytes; None: unknown
    fits: bool
    downloads: int | None  # downloads of the repository per month
    license: str


@dataclass(frozen=True, slots=True)
class _Repository:
    """A repository in the list of a search."""

    repo: str
    format: str
    downloads: int


def search_hub(
    words: str, formats: tuple[str, ...], limit: int, settings: Settings, progress: Progress, memory: int = 0
) -> list[SearchResult]:
    """Search the Hub. Models that fit come first; within each group, the most downloaded model comes first.

    `memory`: device memory to assume, in bytes; 0: the free memory. Raises Offline, or AppError if the Hub refuses.
    """
    with progress.task(f"Searching {hub.host(settings)} for {words}", None):
        check_reachable(settings.hub_endpoint)
        found: dict[str, _Repository] = {}
        for kind in formats:
            for repository in _ask(words, kind, limit, settings, progress):
                found.setdefault(repository.repo, repository)
        chosen = sorted(found.values(), key=lambda it: -it.downloads)[:limit]
        memory = memory or machine_memory(settings)
        with ThreadPoolExecutor(MAX_PARALLEL) as threads:
            looked_at = threads.map(lambda it: _look(it, memory, settings, progress), chosen)
            return _ranked([find for find in looked_at if find])


def search_short_names(words: str, store: ModelStore, settings: Settings, memory: int = 0) -> list[SearchResult]:
    """Search the models with a short name, without the network. Sizes are estimates, except in the catalog."""
    memory = memory or machine_memory(settings)
    of_catalog = [_of_catalog(entry, memory) for entry in store.catalog if _matches(words, entry.name, entry.title)]
    of_families = [
        _of_family(model, memory)
        for model in store.families
        if _matches(words, model.name, model.title, model.kind, str(model.repository))
    ]
    return _ranked([*of_catalog, *of_families])


def _ask(words: str, kind: str, limit: int, settings: Settings, progress: Progress) -> Iterator[_Repository]:
    path = f"/api/models?search={quote(words, safe='')}&filter={kind}&sort=downloads&direction=-1&limit={limit}"
    raw = hub.get(path, words, MAX_BYTES, settings, progress)
    try:
        entries = parse_list(raw)
    except JSONProblem as problem:
        raise AppError(f"the Hub's response to a search is invalid: {problem}") from None
    for entry in entries[:_MOST]:
        match entry:
            case {"id": str(repo), "downloads": int(downloads)} if (name := RepositoryName.parse(repo)) is not None:
                if not name.quantization:
                    yield _Repository(name.repo, kind, downloads)


def _look(found: _Repository, memory: int, settings: Settings, progress: Progress) -> SearchResult | None:
    """Return the best model of a repository; None if it is not accessible, or has no model that can run here."""
    try:
        listing = list_repository(found.repo, settings, progress)
        kind, size = _best(found, listing, memory)
    except AppError:
        return None
    name = str(RepositoryName(found.repo, kind))
    return SearchResult(
        name, found.format, kind, size, is_likely_to_fit(size, memory), found.downloads, listing.license
    )


def _best(found: _Repository, listing: Listing, memory: int) -> tuple[str | None, int]:
    """Return a quantization and its size in bytes.

    The choice is a usual quantization that fits, else the largest that fits, else the smallest.
    """
    if choices := choices_of(listing):
        return _best_choice(choices, memory)
    # raises ModelNotFound if the repository has no model that can run here
    choose(RepositoryName(found.repo), listing.files)
    weights = [file for name, file in listing.files.items() if name.endswith(".safetensors") and "/" not in name]
    if not weights:
        raise ModelNotFound(f"{found.repo} has no weights")
    return None, sum(file.size for file in weights)


def _best_choice(choices: Mapping[str, int], memory: int) -> tuple[str, int]:
    """Choose one of `choices`, which are sorted by size, the largest first."""
    fitting = {kind: size for kind, size in choices.items() if is_likely_to_fit(size, memory)}
    kind = next((kind for kind in (*PREFERRED, *fitting) if kind in fitting), [*choices][-1])
    return kind, choices[kind]


def _matches(words: str, *descriptions: str) -> bool:
    described = " ".join(descriptions).lower()
    return all(word in described for word in words.lower().split())


def _of_catalog(entry: CatalogEntry, memory: int) -> SearchResult:
    fits = is_likely_to_fit(entry.size, memory)
    return SearchResult(entry.name, "gguf", entry.quantization, entry.size, fits, None, entry.license)


def _of_family(model: KnownModel, memory: int) -> SearchResult:
    size = model.usual_size
    fits = is_likely_to_fit(size, memory)
    is_gguf = model.repository.repo.lower().endswith("gguf")
    return SearchResult(model.name, "gguf" if is_gguf else "safetensors", None, size, fits, None, model.license)


def _ranked(finds: list[SearchResult]) -> list[SearchResult]:
    """Sort the results. Those without download counts are sorted by size, the largest that fits first."""

    def rank(find: SearchResult) -> tuple[bool, int, int]:
        size = find.size or 0
        return not find.fits, -(find.downloads or 0), -size if find.fits else size

    return sorted(finds, key=rank)
