"""The load options of the engine: the fingerprint of the weights, and the folder of the on-disk cache."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.models.catalog import load_catalog
from app.models.load import loaded_model
from app.models.load.loaded_model import load_model
from app.models.store import ModelStore
from app.progress import SilentProgress
from app.settings.settings import Settings
from engine.load_options import LoadOptions
from engine.loading import ModelEngine
from quant import tensor_file
from quant.errors import ModelFileError
from quant.gguf import GGUFFile
from quant.tensor_file import TensorFile
from tests.app.models.tiny_chat import save
from tests.app.models.tiny_model import files_below, settings_in

ENTRY = load_catalog().entries[0]


class Loading(Exception):
    """Raised in place of loading the model. It carries the load options."""

    def __init__(self, options: LoadOptions) -> None:
        self.options = options


def options_for(name: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> LoadOptions:
    def load(file: GGUFFile, options: LoadOptions, progress: object, parked: object) -> ModelEngine:
        raise Loading(options)

    monkeypatch.setattr(loaded_model, "load_engine", load)
    with pytest.raises(Loading) as loading:
        load_model(ModelStore(settings).resolve(name), settings, SilentProgress())
    return loading.value.options


def settings_of(folder: Path, **more: object) -> Settings:
    return settings_in(folder, kernels="reference", kv_disk_dir=folder / "kv", context=64, **more)


def test_fingerprint_depends_on_the_weights(tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, tuned = settings_of(tmp_path, kv_disk_gb="0.5"), tmp_path / "tuned.gguf"
    content = bytearray(smollm2.read_bytes())
    content[-1] ^= 1
    tuned.write_bytes(content)
    with GGUFFile(smollm2) as first, GGUFFile(tuned) as second:
        assert first.header_digest == second.header_digest
    before, after = (options_for(str(path), settings, monkeypatch) for path in (smollm2, tuned))
    assert before.fingerprint == ENTRY.sha256 != after.fingerprint
    assert len(after.fingerprint) == 64
    assert after.disk is not None
    assert (after.disk.folder, after.disk.limit, after.disk.model) == (tmp_path / "kv", 500_000_000, "tuned.gguf")
    assert len(files_below(tmp_path / "models" / ".digests")) == 2


def test_digest_of_a_download_is_not_computed_again(
    tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tmp_path, models_dir=smollm2.parent)

    def never(*arguments: object) -> str:
        raise AssertionError("the file was read")

    monkeypatch.setattr(loaded_model, "digest_of", never)
    options = options_for(ENTRY.name, settings, monkeypatch)
    assert options.fingerprint == ENTRY.sha256
    assert options.disk is not None
    assert (options.disk.limit, options.disk.model) == (None, ENTRY.name)


def test_without_disk_cache_no_digest_is_computed(
    tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(str(smollm2), settings_of(tmp_path, kv_disk_gb="0"), monkeypatch)
    assert (str(smollm2) in options.fingerprint, options.disk) == (True, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", range(1, 22, 4))
def test_file_truncated_during_a_load_is_an_error(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is truncated before the tensor with this number is read."""
    save(tmp_path / "model")
    read, left = TensorFile.data, number

    def data(file: TensorFile[Any], name: str, *slab: Any) -> memoryview:
        nonlocal left
        left -= 1
        if left == 0:
            os.truncate(file.path, 4096)
        return read(file, name, *slab)

    settings = settings_of(tmp_path, threads=1)
    stored = ModelStore(settings).resolve(str(tmp_path / "model"))
    monkeypatch.setattr(TensorFile, "data", data)
    with pytest.raises(ModelFileError, match="was truncated to 4,096 bytes while it was read"):
        load_model(stored, settings, SilentProgress())


@pytest.mark.parametrize("place", ["a tensor is read", "a tensor is decoded"])
def test_gguf_file_truncated_during_a_load_is_an_error(
    place: str, tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is truncated before a part of its 30th tensor is read, and after that."""
    path = tmp_path / "cut.gguf"
    shutil.copyfile(smollm2, path)
    read, left = tensor_file._read_into, 30

    def read_into(descriptor: int, data: memoryview, position: int) -> int:
        nonlocal left
        left -= 1
        if left == 0 and place == "a tensor is read":
            os.truncate(path, 1 << 20)
        count = read(descriptor, data, position)
        if left == 0:
            os.truncate(path, 1 << 20)
        return count

    settings = settings_of(tmp_path)
    stored = ModelStore(settings).resolve(str(path))
    monkeypatch.setattr(tensor_file, "_read_into", read_into)
    with pytest.raises(ModelFileError, match="was truncated to 1,048,576 bytes while it was read"):
        load_model(stored, settings, SilentProgress())


def test_cache_folder_describes_its_model(tmp_path: Path, smollm2: Path) -> None:
    settings = settings_of(tmp_path)
    load_model(ModelStore(settings).resolve(str(smollm2)), settings, SilentProgress())
    [folder] = (tmp_path / "kv").iterdir()
    about = json.loads((folder / "about.json").read_text())
    assert about == {
        "model": smollm2.name,
        "sha256": ENTRY.sha256,
        "backend": "reference",
        "kv_type": "float32",
        "made": about["made"],
    }
