"""Models on their way in, whichever screen is seen. Knows no widget."""

from collections.abc import Callable, Coroutine
from contextlib import aclosing

from tui.client import ClientError, Models, NotLoaded
from tui.engine_types import Download, ModelInfo
from tui.running_replies import Running


class Downloads:
    """At most one download of each model; `failed` and `arrived` are told how each ends, but for those that pause."""

    def __init__(
        self,
        models: Models,
        run: Callable[[Coroutine[None, None, None]], Running],
        on_finished: Callable[[str], None],
        on_failed: Callable[[ClientError], None],
    ) -> None:
        self._models = models
        self._run = run
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._running: dict[str, Running] = {}
        self.models: dict[str, ModelInfo] = {}  # those that run, by name
        self.progress: dict[str, Download] = {}  # of the same
        self.ended = 0  # how many have, however they did

    def start(self, model: ModelInfo) -> None:
        """Begin, or go on from where it was paused."""
        name = model.name
        if name not in self._running:
            self.models[name] = model
            self.progress[name] = Download(0, None, 0.0, "starting")
            self._running[name] = self._run(self._pull(name))

    def pause(self, name: str) -> None:
        """What has arrived is kept."""
        if name in self._running:
            self._running[name].cancel()

    async def _pull(self, name: str) -> None:
        try:
            async with aclosing(self._models.pull(name)) as steps:
                async for step in steps:
                    self.progress[name] = step
        except NotLoaded:
            pass  # whoever follows the loading has said so
        except ClientError as error:
            self._on_failed(error)
        else:
            self._on_finished(name)
        finally:
            del self._running[name], self.models[name], self.progress[name]
            self.ended += 1
