"""Models of the Hub, for people who choose one: the recommended one, those found by words, and the quantizations of one
repository.

What asks torch how much memory a GPU has free runs as `ingle` in a process of its own: no torch is to be in the process
of the screens.
"""

import asyncio
import sys
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from app.config import Settings, child_environment
from app.errors import EXIT_NOT_FOUND, EXIT_OK, AppError, Offline
from app.models.machine_memory import is_likely_to_fit
from app.progress import SilentProgress, format_bytes
from app.terminal_chat.engine_process import ROOT
from tui.engine_nouns import Model


class Find(Struct):
    """One line of `ingle search --json`, as far as it is shown."""

    name: str
    size: int | None
    fits: bool
    license: str
    quantization: str | None = None


class Recommended(Struct):
    """What `ingle fit --recommended --json` says, as far as it is shown."""

    name: str
    size: int
    verdict: str


async def recommended(settings: Settings) -> Model | None:
    """The best model for chats that fits this machine; None where none does, or the Hub cannot be asked."""
    from app.models.reachability import check_reachable

    try:
        await asyncio.to_thread(check_reachable, settings.hub_endpoint)
    except Offline:
        return None
    status, out, _ = await _said("fit", "--recommended", "--json")
    if status != EXIT_OK:
        return None
    it = msgspec.json.decode(out, type=Recommended)
    return Model(name=it.name, size=it.size, fit=it.verdict, fits=True)


async def found(words: str) -> Sequence[Model]:
    """What fits comes first. Raises AppError with what the search says."""
    status, out, err = await _said("search", "--json", "--", *words.split())
    if status not in (EXIT_OK, EXIT_NOT_FOUND):
        raise AppError(err.decode(errors="replace").strip().removeprefix("error: ") or "the search failed")
    return [_model(find) for find in msgspec.json.decode(out, type=list[Find])]


async def _said(*words: str) -> tuple[int | None, bytes, bytes]:
    """The exit status, stdout and stderr of a command of ours."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app", *words,
        cwd=ROOT, env=child_environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.communicate()  # to the end of the pipes, which closes them
        raise
    return process.returncode, out, err


def _model(find: Find) -> Model:
    return Model(
        name=find.name,
        quantization=find.quantization or "",
        size=find.size,
        license=find.license,
        fit=_sentence(find.fits),
        fits=find.fits,
    )


def variants(name: str, settings: Settings) -> Sequence[Model]:
    """The quantizations of a repository, what fits first, and the largest of it. Raises AppError."""
    from app.models.hub_listing import list_repository
    from app.models.remote_headers import choices_of
    from app.models.repository import RepositoryName

    repository = RepositoryName.parse(name)
    if repository is None:
        return []
    listing = list_repository(repository.repo, settings, SilentProgress())
    memory = _memory()
    choices = choices_of(listing) or {"": sum(file.size for file in listing.files.values())}
    models = [
        Model(
            name=f"{repository.repo}:{kind}" if kind else repository.repo,
            quantization=kind,
            size=size,
            license=listing.license,
            fits=None if memory is None else is_likely_to_fit(size, memory),
            fit="" if memory is None else f"{_sentence(is_likely_to_fit(size, memory))}: {format_bytes(memory)} free",
        )
        for kind, size in choices.items()
    ]
    return sorted(models, key=lambda model: model.fits is False)


def _memory() -> int | None:
    """Bytes that are free for a model; None where a GPU has them, which is not asked here."""
    from engine.cuda.driver import driver_version
    from engine.kv_budget import available_memory

    return available_memory() if driver_version() is None else None


def _sentence(fits: bool) -> str:
    return "Fits this machine" if fits else "Does not fit this machine"
