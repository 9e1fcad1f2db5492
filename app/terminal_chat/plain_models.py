"""Models and the engine as lines: what is here, what could be, which one answers, and what it does."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from app.terminal_chat.loading_lines import LoadingLines
from tui import figures
from tui.client import Client, ClientError
from tui.engine_nouns import Model
from tui.large_downloads import about, is_asked_about

_CATALOG = "catalog"
_FITS = {None: "", True: ", fits", False: ", too large"}


class PlainModels:
    """Over the port; `say` writes a line, and `agrees` asks a question, to which a pipe says yes."""

    def __init__(self, client: Client, say: Callable[[str], None], agrees: Callable[[str], Awaitable[bool]]) -> None:
        self._client = client
        self._say = say
        self._agrees = agrees

    async def list(self, which: str) -> None:
        """Those here, or those of the catalog."""
        if which not in ("", _CATALOG):
            raise ClientError(f"there is no list {which}", "/models lists what is here, /models catalog what could be.")
        models = self._client.models
        found: Sequence[Model] = await (models.catalog() if which else models.installed())
        for model in found:
            self._say(_line(model))
        if not which:
            self._say(f"/models {_CATALOG} lists what could be fetched." if found else "No model is here yet.")

    async def load(self, name: str) -> None:
        if not name:
            raise ClientError("a name is needed", "/models lists them.")
        if not await self._may_fetch(await self._client.models.find(name)):
            self._say("Nothing was fetched.")
            return
        lines = LoadingLines()
        async with aclosing(self._client.models.load(name)) as states:
            async for state in states:
                if line := lines.line(state):
                    self._say(line)
        self._say(f"Replies come from {name} now.")

    async def _may_fetch(self, model: Model) -> bool:
        free = await self._client.models.free_disk()
        if not is_asked_about(model, free):
            return True
        self._say(about(model, free))
        return await self._agrees("Download this model? yes or no")

    async def tell_engine(self, rest: str) -> None:
        status = await self._client.engine.status()
        self._say(f"{status.model}: {len(status.requests)} requests, {status.reply_tokens} tokens generated.")
        for request in status.requests:
            self._say(f"{request.client or 'a program'}: {request.phase.value}, {request.reply_tokens} tokens")

    async def tell_address(self, rest: str) -> None:
        self._say(self._client.engine.address() or "The engine is not there yet.")


def _line(model: Model) -> str:
    """A model: "qwen3:4b, about 2.5 GB, fits"."""
    size = f", {'about ' * model.is_estimate}{figures.size(model.size)}" if model.size else ""
    if model.loaded:
        return f"{model.name}{size}, answers"
    if model.installed:
        return f"{model.name}{size}, here"
    arrived = f", {figures.size(model.arrived)} of it are here" if model.arrived else ""
    return f"{model.name}{size}{arrived}{', is fetched' * model.fetching}{_FITS[model.fits]}"
