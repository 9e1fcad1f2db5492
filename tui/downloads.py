"""Model downloads that run independently of the visible screen."""

from collections.abc import Callable, Coroutine
from contextlib import aclosing

from tui import figures
from tui.client import ClientError, Models, NotLoaded
from tui.engine_types import Download, ModelInfo
from tui.running_replies import Running


class Downloads:
    """Runs model downloads, at most one for each model.

    `on_finished` or `on_failed` is called when a download ends, but not when it is paused.
    """

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
        self.models: dict[str, ModelInfo] = {}  # model of each running download, by name
        self.progress: dict[str, Download] = {}  # progress of each running download, by name
        self.ended = 0  # number of downloads that finished, failed, or were paused

    def start(self, model: ModelInfo) -> None:
        """Start or resume the download of a model."""
        name = model.name
        if name not in self._running:
            self.models[name] = model
            self.progress[name] = Download(0, None, 0.0, "starting")
            self._running[name] = self._run(self._pull(name))

    def pause(self, name: str) -> None:
        """Pause a download. The part that is already downloaded is kept."""
        if name in self._running:
            self._running[name].cancel()

    async def _pull(self, name: str) -> None:
        try:
            async with aclosing(self._models.pull(name)) as steps:
                async for step in steps:
                    self.progress[name] = step
        except NotLoaded:
            pass  # reported by the caller that follows the loading of the model
        except ClientError as error:
            self._on_failed(error)
        else:
            self._on_finished(name)
        finally:
            del self._running[name], self.models[name], self.progress[name]
            self.ended += 1


def describe_progress(progress: Download) -> str:
    """Return the downloaded share, the speed, and the time left, or the stage."""
    if progress.stage:
        return progress.stage
    share = figures.percent(progress.done, progress.total or 0) or figures.size(progress.done)
    speed = round(progress.bytes_per_second)
    if not speed:
        return share
    left = f", {figures.time_left((progress.total - progress.done) / speed)}" if progress.total else ""
    return f"{share}, {figures.size(speed)}/s{left}"
