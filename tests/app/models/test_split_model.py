"""A GGUF model in several parts: opening any part loads the same model as the unsplit file."""

from pathlib import Path

import pytest

from app.models.load.loaded_model import load_model
from app.models.store import ModelStore
from app.progress import SilentProgress
from engine.loading import open_checkpoint
from engine.models import stored_weights
from tests.app.models.tiny_model import settings_in
from tests.support.first_layers import write_first_layers
from tests.support.gguf_reader import Reader

LAYERS = 2


@pytest.fixture(scope="module")
def reader(smollm2: Path) -> Reader:
    return Reader(smollm2)


def written(reader: Reader, folder: Path, most_tensors: int = 0) -> list[Path]:
    """Write the first layers and all metadata of the default model with the `gguf` package, and return the paths.

    `most_tensors` is the maximum number of tensors per part; 0 writes one file.
    """
    path = folder / "smollm2-Q4_1.gguf"
    write_first_layers(reader, path, LAYERS, tokenizer=True, most_tensors=most_tensors)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def parts(reader: Reader, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return written(reader, tmp_path_factory.mktemp("split"), most_tensors=12)


def test_split_model_equals_the_whole_model(reader: Reader, parts: list[Path], tmp_path: Path) -> None:
    [path] = written(reader, tmp_path)
    with open_checkpoint(path) as whole, open_checkpoint(parts[1]) as split:
        said = {key: value for key, value in split.metadata.values.items() if not key.startswith("split.")}
        assert said == dict(whole.metadata.values)
        assert stored_weights(split).keys() == stored_weights(whole).keys()


def test_split_model_loads_from_any_part(parts: list[Path], tmp_path: Path) -> None:
    settings = settings_in(tmp_path, kernels="reference", kv_disk_dir=tmp_path / "kv", kv_disk_gb="0.5", context=64)
    stored = ModelStore(settings).resolve(str(parts[1]))
    assert (stored.path, stored.size) == (parts[0], sum(part.stat().st_size for part in parts))
    loaded = load_model(stored, settings, SilentProgress())
    assert loaded.tokenizer.vocab_size == loaded.engine.vocab_size == 49152
    assert len(list((tmp_path / "models" / ".digests").iterdir())) == len(parts) == 2
