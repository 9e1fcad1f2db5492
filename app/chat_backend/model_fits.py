"""Whether models fit this machine, and which is the best of those that do: what `ingle fit` says, for the screens."""

import asyncio

import msgspec
from msgspec import Struct

from app.chat_backend.engine.process import reason, said, with_memory
from app.errors import EXIT_OK, AppError, Offline
from app.settings.settings import Settings
from tui.engine_nouns import Fit, Recommendation


class _Found(Struct):
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
    status, out, _ = await said("fit", "--recommended", "--json")
    if status != EXIT_OK:
        return None
    found = msgspec.json.decode(out, type=_Found)
    return Recommendation(found.name, found.verdict)


async def fit_of(name: str, settings: Settings, memory: int) -> Fit:
    """Of one model, with the context that was asked for. `memory`: bytes that it would find; 0: those that are free.

    Raises AppError with what the command says.
    """
    context = ("--context", str(settings.context)) if settings.context else ()
    _, out, err = await said("fit", "--json", *context, *with_memory(memory), "--", name)
    try:
        found = msgspec.json.decode(out, type=_Found)
    except msgspec.DecodeError:
        raise AppError(reason(err, "ingle fit failed")) from None
    return Fit(found.verdict, found.fits)
