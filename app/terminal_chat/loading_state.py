"""How the loading of a model goes, told to any number of listeners: the latest state, as often as it changes."""

import asyncio
from collections.abc import AsyncGenerator

from tui.client import ClientError, NotLoaded
from tui.engine_nouns import Loading


class LoadingState:
    """Begins as loading; ends once, loaded or failed. Used on one event loop."""

    def __init__(self, model: str, stage: str = "starting") -> None:
        """`stage`: what is done first, in words."""
        self.model = model
        self.now = Loading(model, stage)
        self._changed = asyncio.Event()
        self._version = 0
        self.is_over = False
        self.problem: ClientError | None = None

    def tell(self, model: str, stage: str, fraction: float | None = None) -> None:
        self._take(Loading(model, stage, fraction))

    def succeed(self, model: str) -> None:
        """By the name of the model that answers."""
        self._take(Loading(model, "loaded", loaded=True))
        self.end()

    def end(self, problem: ClientError | None = None) -> None:
        """Once: what comes later changes nothing."""
        if self.is_over:
            return
        self.is_over, self.problem = True, problem
        self._wake()

    async def over(self) -> None:
        """Wait for the end. Raises NotLoaded where the loading failed."""
        while not self.is_over:
            await self._changed.wait()
        if self.problem is not None:
            raise NotLoaded(self.problem.message, self.problem.remedy) from self.problem

    async def states(self) -> AsyncGenerator[Loading, None]:
        """The state now, each later one that there is time for, and the last. Raises why the loading failed."""
        seen = -1
        while self._version != seen or not self.is_over:
            if self._version != seen:
                seen = self._version
                yield self.now
            else:
                await self._changed.wait()
        if self.problem is not None:
            raise self.problem

    def _take(self, now: Loading) -> None:
        if not self.is_over:
            self.now = now
            self._version += 1
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
