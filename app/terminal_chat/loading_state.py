"""How the loading of a model goes, told to any number of listeners: the latest state, as often as it changes."""

import asyncio
from collections.abc import AsyncGenerator

from tui.client import ClientError
from tui.engine_nouns import Loading


class LoadingState:
    """Begins as loading; ends once, loaded or failed. Used on one event loop."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._now = Loading(model, "starting")
        self._changed = asyncio.Event()
        self._version = 0
        self.is_over = False
        self._problem: ClientError | None = None

    def tell(self, model: str, stage: str, fraction: float | None = None) -> None:
        self._now = Loading(model, stage, fraction)
        self._wake()

    def end(self, problem: ClientError | None = None) -> None:
        """Once: what comes later changes nothing."""
        if self.is_over:
            return
        self.is_over, self._problem = True, problem
        self._wake()

    async def over(self) -> None:
        """Wait for the end. Raises the ClientError of a loading that failed."""
        while not self.is_over:
            await self._changed.wait()
        if self._problem is not None:
            raise self._problem

    async def states(self) -> AsyncGenerator[Loading, None]:
        """The state now, and each later one that there is time for. Raises as `over` does."""
        seen = -1
        while not self.is_over:
            if self._version != seen:
                seen = self._version
                yield self._now
            else:
                await self._changed.wait()
        await self.over()

    def _wake(self) -> None:
        self._version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
