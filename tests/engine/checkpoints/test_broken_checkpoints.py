"""Incomplete, damaged, and hostile checkpoints: each raises one error that names the problem, and no resources leak."""

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import UnsupportedModel
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from quant.errors import InglenookError, ModelFileError, SafetensorsError
from tests.engine.checkpoints.quantized_folders import edit_config
from tests.engine.models.tiny_llama import make
from tests.quant.opened_files import open_descriptors

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three shards with an index."""
    folder = tmp_path_factory.mktemp("intact")
    make(folder).reference.save_pretrained(folder / "checkpoint", max_shard_size="150KB")
    assert len(list((folder / "checkpoint").glob("*.safetensors"))) == 3
    return folder / "checkpoint"


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for file in intact.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def edit_shard(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], *, number: int = 1) -> None:
    tensors = load_file(shard(folder, number))
    change(tensors)
    save_file(tensors, shard(folder, number))


def edit_map(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def truncate(folder: Path) -> None:
    os.truncate(shard(folder, 2), shard(folder, 2).stat().st_size - 1)


def link_outside(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    shard(folder, 0).rename(outside)
    (folder / "model-00001-of-00003.safetensors").symlink_to(outside)


def link_config_outside(folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "config.json")
    (folder / "config.json").symlink_to(folder.parent / "config.json")


def remove_tensor(folder: Path) -> None:
    edit_shard(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    edit_map(folder, lambda names: names.pop("model.layers.1.mlp.up_proj.weight"))


def add_tensor(folder: Path) -> None:
    edit_shard(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.sinks": torch.zeros(4)}))
    edit_map(folder, lambda names: names.update({"model.layers.1.self_attn.sinks": shard(folder, 1).name}))


def remove_weights(folder: Path) -> None:
    for path in folder.glob("*safetensors*"):
        path.unlink()


def change_shape(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_shard(folder, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))


Break = Callable[[Path], object]
BREAKS: dict[str, tuple[Break, type[InglenookError], str]] = {
    "a shard is missing": (lambda f: shard(f, 1).unlink(), SafetensorsError, "00002-of-00003"),
    "a shard is truncated": (truncate, SafetensorsError, "00003-of-00003"),
    "a shard is a link out of the folder": (link_outside, SafetensorsError, "outside of"),
    "the index has a parent path": (
        lambda f: edit_map(f, lambda m: m.update({"x": "../x.safetensors"})),
        SafetensorsError,
        "x",
    ),
    "the index has an absolute path": (
        lambda f: edit_map(f, lambda m: m.update({"x": "/etc/passwd"})),
        SafetensorsError,
        "x",
    ),
    "the index names a pickle": (lambda f: edit_map(f, lambda m: m.update({"x": "x.bin"})), SafetensorsError, "x.bin"),
    "the index has a list as its map": (
        lambda f: (f / INDEX).write_text('{"weight_map": [1]}'),
        SafetensorsError,
        "weight_map",
    ),
    "a tensor is missing": (remove_tensor, ModelFileError, r"blk\.1\.ffn_up"),
    "a tensor is unknown": (add_tensor, UnsupportedModel, "sinks"),
    "a tensor has another shape": (change_shape, ModelFileError, r"layers\.1\.mlp\.up_proj"),
    "no configuration": (lambda f: (f / "config.json").unlink(), ModelFileError, r"config\.json"),
    "the configuration is a link out of the folder": (link_config_outside, ModelFileError, "outside of"),
    "the configuration is not JSON": (lambda f: (f / "config.json").write_text("{"), ModelFileError, "JSON"),
    "an unknown architecture": (lambda f: edit_config(f, model_type="mamba"), UnsupportedModel, "'mamba'"),
    "no architecture": (lambda f: edit_config(f, model_type=None), UnsupportedModel, "model_type"),
    "more layers than tensors": (lambda f: edit_config(f, num_hidden_layers=4), ModelFileError, r"blk\.3\."),
    "fewer layers than tensors": (lambda f: edit_config(f, num_hidden_layers=2), UnsupportedModel, r"blk\.2\."),
    "another vocabulary": (lambda f: edit_config(f, vocab_size=98), ModelFileError, "embed_tokens"),
    "another activation": (lambda f: edit_config(f, hidden_act="relu"), UnsupportedModel, "hidden_act"),
    "no weights": (remove_weights, ModelFileError, "safetensors"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_checkpoint_raises_one_error_and_leaks_nothing(folder: Path, name: str) -> None:
    change, kind, words = BREAKS[name]
    change(folder)
    with pytest.raises(kind, match=words) as caught, open_checkpoint(folder) as checkpoint:
        load_engine(checkpoint, LoadOptions(backend="reference"))
    assert type(caught.value).__name__ in {"SafetensorsError", "ModelFileError", "UnsupportedModel"}
    del caught
    gc.collect()
    assert open_descriptors(folder) == []


def test_intact_checkpoint_loads(folder: Path) -> None:
    """The intact fixture is valid, so each change above causes its error."""
    with open_checkpoint(folder) as checkpoint:
        assert open_descriptors(folder)
        assert load_engine(checkpoint, LoadOptions(backend="reference")).vocab_size == 97
