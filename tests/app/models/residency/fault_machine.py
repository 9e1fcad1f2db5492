"""A server's models whose loads fail at a stage that a test names, and a check that nothing stays of a failed load."""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.generation.template import ChatTemplateRenderer
from app.models.load import model_loader
from app.models.load.model_loader import LoadedChat, LoadedEmbedder, ModelLoader
from app.models.residency.residents import Residents
from app.models.store import ModelStore
from app.progress import SilentProgress
from engine import loading
from engine.core import Engine
from engine.embedding import loading as embedder_loading
from engine.embedding.encoder import Encoder
from tests.app.models.tiny_model import settings_in
from tests.app.server.live_server import Clock
from tests.support.processes import until

DESCRIPTORS = "/proc/self/fd"  # Linux only

Loaded = LoadedChat | LoadedEmbedder
MakeError = Callable[[], Exception]
Stage = tuple[Any, str]  # an object, and its function that fails


class Loader(ModelLoader):
    """Counts the attempts to load a model."""

    attempts = 0

    def needs(self, name: str) -> Any:
        self.attempts += 1
        return super().needs(name)


class Machine:
    """A server's models "a" and "b", which have the same files, and what their loads have made."""

    def __init__(self, loader: Loader, folder: Path, files: Path, patch: pytest.MonkeyPatch) -> None:
        self.loader = loader
        self.folder = folder  # contains all files that a load opens
        self.files = files
        self.clock = Clock()
        self.residents: Residents[Loaded] = Residents(loader, clock=self.clock)
        self.engines: list[Engine[Any]] = []
        self.encoders: list[Encoder] = []
        self.renderers: list[ChatTemplateRenderer] = []
        self._patch = patch
        self._record(loading, "Engine", self.engines)
        self._record(embedder_loading, "Encoder", self.encoders)
        self._record(model_loader, "ChatTemplateRenderer", self.renderers)

    def _record(self, module: Any, name: str, made: list[Any]) -> None:
        make = getattr(module, name)

        def recording(*args: Any, **options: Any) -> Any:
            made.append(make(*args, **options))
            return made[-1]

        self._patch.setattr(module, name, recording)

    def fail(self, stage: Stage, make_error: MakeError, attempts: int = 1) -> None:
        """Make all calls of a function fail in the first attempts to load a model."""
        target, name = stage
        call = getattr(target, name)

        def failing(*args: Any, **options: Any) -> Any:
            if self.loader.attempts <= attempts:
                raise make_error()
            return call(*args, **options)

        self._patch.setattr(target, name, failing, raising=False)

    async def use(self, name: str) -> None:
        async with self.residents.use(name) as loaded:
            assert loaded.failure == ""

    def check_nothing_is_left(self) -> None:
        """Assert that no model is loaded, and that no load has left memory, processes, or files of this test."""
        assert self.residents.memory.ledger({}).entries == []
        assert all(engine._is_closed for engine in self.engines)
        assert all(encoder._is_closed for encoder in self.encoders)
        assert all(renderer._child is None for renderer in self.renderers)
        assert open_files(self.folder) == []


@contextmanager
def machine_with(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Yield a machine with copies of the files of a saved model."""
    files = tmp_path / "model"
    shutil.copytree(saved, files)  # tests remove files
    settings = settings_in(tmp_path / "home", kernels="reference", threads=1, kv_disk_dir=tmp_path / "kv")
    store = ModelStore(settings)
    given = dict.fromkeys("ab", store.resolve(str(files)))
    with closing(Loader(settings, store, given, {}, SilentProgress())) as loader:
        yield Machine(loader, tmp_path, files, monkeypatch)


def open_files(folder: Path) -> list[str]:
    """Return the open files below a folder. Other threads of the process may open and close other files."""
    if not os.path.exists(DESCRIPTORS):
        return []
    found = []
    for number in os.listdir(DESCRIPTORS):
        try:
            path = os.readlink(f"{DESCRIPTORS}/{number}")
        except FileNotFoundError:  # it was closed meanwhile
            continue
        if path.startswith(f"{folder}/"):
            found.append(path)
    return found


def run_and_check(machine: Machine, work: Callable[[], Any]) -> None:
    """Run a test on an event loop, and assert that it leaves nothing."""
    threads = set(threading.enumerate())

    async def main() -> None:
        await work()
        for name in "ab":
            await machine.residents.unload(name)
        machine.check_nothing_is_left()
        await machine.residents.close()

    asyncio.run(main())
    until(lambda: set(threading.enumerate()) <= threads)
