"""Models on their way in, whichever screen is seen. Knows no widget."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from tui.client import ClientError, Models
from tui.engine_nouns import Download


class Downloads:
    """At most one download of each model; `failed` and `arrived` are told how each ends, but for those that pause."""

    def __init__(self, models: Models, arrived: Callable[[str], None], failed: Callable[[ClientError], None]) -> None:
        self._models = models
        self._arrived = arrived
        self._failed = failed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.progress: dict[str, Download] = {}  # of those that run

    def start(self, name: str) -> None:
        """Begin, or go on from where it was paused."""
        if name not in self._tasks:
            self.progress[name] = Download(0, None, 0.0, "starting")
            self._tasks[name] = asyncio.create_task(self._pull(name))

    def pause(self, name: str) -> None:
        """What has arrived is kept."""
        if name in self._tasks:
            self._tasks[name].cancel()

    async def close(self) -> None:
        """Pause them all."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pull(self, name: str) -> None:
        try:
            async with aclosing(self._models.pull(name)) as steps:
                async for step in steps:
                    self.progress[name] = step
        except ClientError as error:
            self._failed(error)
        else:
            self._arrived(name)
        finally:
            del self._tasks[name], self.progress[name]
