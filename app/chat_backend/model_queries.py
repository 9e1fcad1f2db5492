"""Questions about models for the screens, which `ingle search`, `ingle fit`, and a repository's listing answer."""

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
    """One line of `ingle search --json`, as far as it is shown."""

    name: str
    size: int | None
    fits: bool
    license: str
    quantization: str | None = None


async def search_models(words: str, memory: int) -> SearchResults:
    """What fits comes first. `memory`: bytes that a model would find; 0: those that are free. Raises AppError with
    what the search says."""
    status, out, err = await run_ingle("search", "--json", *memory_option(memory), "--", *words.split())
    if status not in (EXIT_OK, EXIT_NOT_FOUND):
        raise AppError(error_message(err, "the search failed"))
    note = _note(err)
    return SearchResults(
        tuple(_model(find, is_known=bool(note)) for find in msgspec.json.decode(out, type=list[_SearchResult])), note
    )


def _model(result: _SearchResult, *, is_known: bool) -> ModelInfo:
    """`is_known`: it is one of those with a short name."""
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
    """Why models with a short name were searched instead; empty where they were not."""
    from app.models.hub_search import OF_FAMILIES

    return next((line for line in err.decode(errors="replace").splitlines() if OF_FAMILIES in line), "")


def variants(name: str, settings: Settings, memory: int | None) -> Sequence[ModelInfo]:
    """The quantizations of a repository, what fits first, and the largest of it. `memory`: bytes that a model would
    find; None: nobody knows. Raises AppError."""
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
    """What `ingle fit --json` says, as far as it is shown."""

    name: str
    verdict: str
    fits: bool


async def recommended(settings: Settings) -> Recommendation | None:
    """The best model for chats that fits this machine; None where none does, or the Hub cannot be asked."""
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
    """Of one model, with the context that was asked for. `memory`: bytes that it would find; 0: those that are free.

    Raises AppError with what the command says.
    """
    context = ("--context", str(settings.context)) if settings.context else ()
    _, out, err = await run_ingle("fit", "--json", *context, *memory_option(memory), "--", name)
    try:
        found = msgspec.json.decode(out, type=_Fit)
    except msgspec.DecodeError:
        raise AppError(error_message(err, "ingle fit failed")) from None
    return Fit(found.verdict, found.fits)
