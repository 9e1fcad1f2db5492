"""A GGUF model in parts, from any of its parts to a loaded model: the same as the whole."""

from pathlib import Path

import gguf
import pytest

from app.models.loaded_model import load_model
from app.models.store import ModelStore
from app.progress import SilentProgress
from engine.loading import open_checkpoint
from engine.models import stored_weights
from tests.app.models.tiny_model import settings_in
from tests.gguf_reader import Reader


@pytest.fixture(scope="module")
def parts(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The default model with all that its file says of it, split by the `gguf` package's writer."""
    folder = tmp_path_factory.mktemp("split")
    reader = Reader(smollm2)
    writer = gguf.GGUFWriter(folder / "smollm2-Q4_1.gguf", "llama", split_max_tensors=150)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            item = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], item)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.iterdir())


def test_it_says_what_the_whole_says(smollm2: Path, parts: list[Path]) -> None:
    with open_checkpoint(smollm2) as whole, open_checkpoint(parts[1]) as split:
        said = {key: value for key, value in split.metadata.values.items() if not key.startswith("split.")}
        assert said == dict(whole.metadata.values)
        assert stored_weights(split).keys() == stored_weights(whole).keys()


def test_it_loads(parts: list[Path], tmp_path: Path) -> None:
    settings = settings_in(tmp_path, kernels="reference", kv_disk_dir=tmp_path / "kv", kv_disk_gb="0.5", context=64)
    stored = ModelStore(settings).resolve(str(parts[1]))
    assert (stored.path, stored.size) == (parts[0], sum(part.stat().st_size for part in parts))
    loaded = load_model(stored, settings, SilentProgress())
    assert loaded.tokenizer.vocab_size == loaded.engine.vocab_size == 49152
    assert len(list((tmp_path / "models" / ".digests").iterdir())) == len(parts) == 2
