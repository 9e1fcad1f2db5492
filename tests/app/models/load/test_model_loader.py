"""ModelLoader with a tiny model: what would let two models fit together, and the memory that a load frees."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from app.models.load import model_loader
from app.models.load.model_loader import ModelLoader
from app.models.residency.ledger import HOST
from app.models.residency.resident import LoadTask
from app.models.store import ModelStore
from app.progress import SilentProgress
from engine.checkpoints.safetensors import SafetensorsCheckpoint
from tests.app.models import tiny_chat
from tests.app.models.tiny_model import settings_in


@pytest.fixture
def loader(tmp_path: Path) -> Iterator[ModelLoader]:
    """A loader of the models "a" and "b", which are the same files."""
    tiny_chat.save(tmp_path / "model")
    settings = settings_in(tmp_path / "home", kernels="reference")
    store = ModelStore(settings)
    given = dict.fromkeys("ab", store.resolve(str(tmp_path / "model")))
    with closing(ModelLoader(settings, store, given, {}, SilentProgress())) as loader:
        yield loader


def test_advice_has_the_numbers_of_the_files(loader: ModelLoader) -> None:
    needed = loader.needs("a").useful[HOST]
    assert loader.together(("a", "b"), {HOST: 10 * needed}).remedy == ""
    advice = loader.together(("a", "b"), {HOST: 2 * needed - 1})
    assert advice.shares[HOST].needed == (needed, needed)
    assert advice.remedy.startswith("They do not fit with context = 4096 either (host ")


def test_load_ends_with_a_trim_after_the_checkpoint_is_closed(
    loader: ModelLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def close(checkpoint: SafetensorsCheckpoint) -> None:
        events.append("close")
        original(checkpoint)

    original = SafetensorsCheckpoint.close
    monkeypatch.setattr(SafetensorsCheckpoint, "close", close)
    monkeypatch.setattr(model_loader, "trim", lambda: events.append("trim"))
    loaded = loader.load("a", loader.available(), LoadTask(), None)
    assert "close" in events
    assert events[-1] == "trim"
    asyncio.run(loaded.close(parks=False))
