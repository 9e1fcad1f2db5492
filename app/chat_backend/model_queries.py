"""Queries about models that need a child process or the Hub: search, fit, recommendation, and variants."""

import asyncio
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from app.chat_backend.engine.process import error_message, memory_option, run_ingle
from app.errors import EXIT_NOT_FOUND, EXIT_OK, AppError, Offline
from app.models.machine_memory import is_likely_to_fit
from app.progress import SilentProgress
from app.settings.settings import Settings
from tui.engine_types import Fit, ModelInfo, Recommendation, SearchResults


class _SearchResult(Struct):
    """One line of `ingle search --json`. Only the fields used here."""

    name: str
    size: int | None
    fits: bool
    license: str
    quantization: str | None = None


async def search_models(words: str, memory: int) -> SearchResults:
    """Search the Hub, and return the models that fit first.

    `memory`: bytes available to a model; 0: `ingle search` measures the free memory. Raises AppError with the message
    of the search.
    """
    status, out, err = await run_ingle("search", "--json", *memory_option(memory), "--", *words.split())
    if status not in (EXIT_OK, EXIT_NOT_FOUND):
        raise AppError(error_message(err, "the search failed"))
    note = _note(err)
    return SearchResults(
        tuple(_model(find, is_known=bool(note)) for find in msgspec.json.decode(out, type=list[_SearchResult])), note
    )


def _model(result: _SearchResult, *, is_known: bool) -> ModelInfo:
    """Convert a search result. `is_known`: the model has a short name, and its size is an estimate."""
    return ModelInfo(
        result.name,
        result.quantization or "",
        result.size,
        result.license,
        result.fits,
        is_estimate=is_known,
        is_repository=not is_known,
    )


def _note(err: bytes) -> str:
    """Return the line of stderr that says why only models with short names were searched; empty if the Hub was
    searched.
    """
    from app.models.hub_search import SHORT_NAMES

    return next((line for line in err.decode(errors="replace").splitlines() if SHORT_NAMES in line), "")


def variants(name: str, settings: Settings, memory: int | None) -> Sequence[ModelInfo]:
    """Return the quantizations of a repository: those that fit first, then from large to small.

    `memory`: bytes available to a model; None if unknown. Raises AppError.
    """
    from app.models.hub_listing import list_repository
    from app.models.remote_headers import choices_of
    from app.models.repository import RepositoryName

    repository = RepositoryName.parse(name)
    if repository is None:
        return []
    listing = list_repository(repository.repo, settings, SilentProgress())
    choices = choices_of(listing) or {"": sum(file.size for file in listing.files.values())}
    models = [
        ModelInfo(
            name=f"{repository.repo}:{kind}" if kind else repository.repo,
            quantization=kind,
            size=size,
            license=listing.license,
            fits=None if memory is None else is_likely_to_fit(size, memory),
        )
        for kind, size in choices.items()
    ]
    return sorted(models, key=lambda model: model.fits is False)


class _Fit(Struct):
    """The output of `ingle fit --json`. Only the fields used here."""

    name: str
    verdict: str
    fits: bool


async def recommended(settings: Settings) -> Recommendation | None:
    """Return the best chat model that fits this machine, or None if none fits or the Hub is unreachable."""
    from app.models.reachability import check_reachable

    try:
        await asyncio.to_thread(check_reachable, settings.hub_endpoint)
    except Offline:
        return None
    status, out, _ = await run_ingle("fit", "--recommended", "--json")
    if status != EXIT_OK:
        return None
    found = msgspec.json.decode(out, type=_Fit)
    return Recommendation(found.name, found.verdict)


async def check_fit(name: str, settings: Settings, memory: int) -> Fit:
    """Return whether a model fits with the context length from the settings.

    `memory`: bytes available to the model; 0: `ingle fit` measures the free memory. Raises AppError with the message of
    the command.
    """
    context = ("--context", str(settings.context)) if settings.context else ()
    _, out, err = await run_ingle("fit", "--json", *context, *memory_option(memory), "--", name)
    try:
        found = msgspec.json.decode(out, type=_Fit)
    except msgspec.DecodeError:
        raise AppError(error_message(err, "ingle fit failed")) from None
    return Fit(found.verdict, found.fits)
