"""ModelLoader with a tiny model: what would let two models fit together."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from app.models.ledger import HOST
from app.models.load.model_loader import ModelLoader
from app.models.store import ModelStore
from app.progress import SilentProgress
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
