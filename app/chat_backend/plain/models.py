"""Commands of the plain chat about models and the engine."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from app.chat_backend.engine.loading_state import LoadingLines
from tui import figures
from tui.client import Client, ClientError
from tui.engine_types import ModelInfo
from tui.large_downloads import describe_download, needs_confirmation

_CATALOG = "catalog"
_FITS = {None: "", True: ", fits", False: ", too large"}


class PlainModels:
    """Commands about models. `say` writes a line. `agrees` asks the user; it returns True if stdin is a pipe."""

    def __init__(self, client: Client, say: Callable[[str], None], agrees: Callable[[str], Awaitable[bool]]) -> None:
        self._client = client
        self._say = say
        self._agrees = agrees

    async def list(self, which: str) -> None:
        """List the installed models, or the catalog."""
        if which not in ("", _CATALOG):
            raise ClientError(
                f"there is no list {which}", "/models lists installed models, /models catalog those to download."
            )
        models = self._client.models
        found: Sequence[ModelInfo] = await (models.catalog() if which else models.installed())
        for model in found:
            self._say(_line(model))
        if not which and not models.endpoint():
            self._say(f"/models {_CATALOG} lists models to download." if found else "No models installed.")

    async def load(self, name: str) -> None:
        if not name:
            raise ClientError("/load needs the name of a model", "/models lists them.")
        if not await self._may_fetch(await self._client.models.find(name)):
            self._say("Nothing was downloaded.")
            return
        lines = LoadingLines()
        async with aclosing(self._client.models.load(name)) as states:
            async for state in states:
                if line := lines.line(state):
                    self._say(line)
        self._say(f"Now using {name}.")

    async def _may_fetch(self, model: ModelInfo) -> bool:
        free = await self._client.models.free_disk()
        if not needs_confirmation(model, free):
            return True
        self._say(describe_download(model, free))
        return await self._agrees("Download this model? yes or no")

    async def tell_engine(self, rest: str) -> None:
        status = await self._client.engine.status()
        self._say(f"{status.model}: {len(status.requests)} requests, {status.reply_tokens} tokens generated.")
        for request in status.requests:
            self._say(f"{request.client or 'a program'}: {request.phase.value}, {request.reply_tokens} tokens")

    async def tell_address(self, rest: str) -> None:
        self._say(self._client.engine.address() or "The engine is still starting.")


def _line(model: ModelInfo) -> str:
    """Describe a model in a line: "qwen3:4b, about 2.5 GB, fits"."""
    size = f", {'about ' * model.is_estimate}{figures.size(model.size)}" if model.size else ""
    if model.loaded:
        return f"{model.name}{size}, in use"
    if model.installed:
        return f"{model.name}{size}, installed"
    arrived = f", {figures.size(model.arrived)} downloaded" if model.arrived else ""
    return f"{model.name}{size}{arrived}{', downloading' * model.fetching}{_FITS[model.fits]}"
