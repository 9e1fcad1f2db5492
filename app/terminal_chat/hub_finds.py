"""Models of the Hub, for people who choose one: found by words, and the quantizations of one repository.

The search runs as `ingle search` in a process of its own: where there is a GPU it asks torch how much memory is free,
and no torch is to be in the process of the screens.
"""

import asyncio
import sys
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from app.config import Settings, child_environment
from app.errors import EXIT_NOT_FOUND, EXIT_OK, AppError
from app.progress import SilentProgress, format_bytes
from app.terminal_chat.engine_process import ROOT
from tui.engine_nouns import Model

_ROOM = 1.15  # bytes that a model takes for each of its files, with a context of some length


class Find(Struct):
    """One line of `ingle search --json`, as far as it is shown."""

    name: str
    size: int | None
    fits: bool
    license: str
    quantization: str | None = None


async def found(words: str) -> Sequence[Model]:
    """What fits comes first. Raises AppError with what the search says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app", "search", "--json", "--", *words.split(),
        cwd=ROOT, env=child_environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.communicate()  # to the end of the pipes, which closes them
        raise
    if process.returncode not in (EXIT_OK, EXIT_NOT_FOUND):
        raise AppError(err.decode(errors="replace").strip().removeprefix("error: ") or "the search failed")
    return [_model(find) for find in msgspec.json.decode(out, type=list[Find])]


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
            fits=None if memory is None else size * _ROOM <= memory,
            fit="" if memory is None else f"{_sentence(size * _ROOM <= memory)}: {format_bytes(memory)} are free",
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
