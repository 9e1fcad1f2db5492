"""Damaged and hostile mixtures of experts: each raises one error that names the problem, and no resources leak."""

import gc
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import UnsupportedModel
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from quant.errors import InglenookError, ModelFileError
from tests.engine.checkpoints.quantized_folders import edit_config
from tests.engine.models.expert_families import EXPERT_FAMILIES
from tests.engine.models.family import Write
from tests.engine.models.family_checkpoints import make, random_model, write_gguf
from tests.quant.opened_files import open_descriptors

Break = Callable[[Path], object]
Change = Callable[[Tensor], Tensor]
UP = "model.layers.1.mlp.experts.5.up_proj.weight"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reshape(name: str, part: Callable[[Tensor], Tensor]) -> Break:
    return lambda folder: edit_tensors(folder, lambda t: t.update({name: part(t[name]).contiguous()}))


FOLDERS: dict[str, tuple[str, Break, type[InglenookError], str]] = {
    "more active experts than experts": (
        "folder",
        lambda f: edit_config(f, num_experts_per_tok=9),
        UnsupportedModel,
        "is 9, but the model has 8 experts",
    ),
    "no active experts": (
        "folder",
        lambda f: edit_config(f, num_experts_per_tok=0),
        UnsupportedModel,
        "num_experts_per",
    ),
    "no experts": (
        "folder",
        lambda f: edit_config(f, num_experts=0, num_local_experts=0),
        UnsupportedModel,
        "num_local_experts is 0",
    ),
    "too many experts": (
        "folder",
        lambda f: edit_config(f, num_local_experts=1 << 30),
        UnsupportedModel,
        "num_local_experts",
    ),
    "an expert has no matrix": (
        "folder",
        lambda f: edit_tensors(f, lambda t: t.pop(UP)),
        ModelFileError,
        r"no tensor blk\.1\.ffn_up\.5",
    ),
    "a matrix has another shape": ("folder", reshape(UP, lambda t: t[:-1]), ModelFileError, r"experts\.5\.up_proj"),
    "an expert more than the configuration has": (
        "folder",
        lambda f: edit_config(f, num_local_experts=7),
        ModelFileError,
        r"mlp\.gate",
    ),
    "the router has another shape": (
        "folder",
        reshape("model.layers.1.mlp.gate.weight", lambda t: t[1:]),
        ModelFileError,
        r"mlp\.gate",
    ),
    "a stacked tensor lacks an expert": (
        "fused",
        reshape(GATE_UP, lambda t: t[1:]),
        ModelFileError,
        r"blk\.1\.ffn_\w+\.7",
    ),
    "a stacked tensor has two dimensions": (
        "fused",
        reshape(GATE_UP, lambda t: t[0]),
        UnsupportedModel,
        "gate_up_proj",
    ),
    "a stacked tensor has another width": (
        "fused",
        reshape(GATE_UP, lambda t: t[:, 2:]),
        ModelFileError,
        r"layers\.1\.mlp\.experts\.gate_up_proj",
    ),
    "a stacked tensor has integers": ("fused", reshape(GATE_UP, lambda t: t.int()), UnsupportedModel, "I32"),
    "a stacked tensor is empty": ("fused", reshape(GATE_UP, lambda t: t[:0]), UnsupportedModel, "gate_up_proj"),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each spelling."""
    folder = tmp_path_factory.mktemp("intact")
    for source in ("folder", "fused"):
        (folder / source).mkdir()
        make(folder / source, "qwen3 moe", source)
    return folder


def refused(path: Path, kind: type[InglenookError], words: str) -> None:
    """Check that loading raises the error, and releases what it opened."""
    with pytest.raises(kind, match=words) as caught, open_checkpoint(path) as checkpoint:
        load_engine(checkpoint, LoadOptions(backend="reference"))
    del caught
    gc.collect()
    assert open_descriptors(path.parent) == []


@pytest.mark.parametrize("name", FOLDERS)
def test_broken_folder_raises_one_error_and_leaks_nothing(intact: Path, tmp_path: Path, name: str) -> None:
    source, change, kind, words = FOLDERS[name]
    folder = tmp_path / "checkpoint"
    shutil.copytree(intact / source, folder)
    change(folder)
    refused(folder, kind, words)


@pytest.mark.parametrize("source", ["folder", "fused"])
def test_intact_checkpoint_loads(intact: Path, source: str) -> None:
    with open_checkpoint(intact / source) as checkpoint:
        assert load_engine(checkpoint, LoadOptions(backend="reference")).vocab_size == 97


# -- GGUF files: (metadata that is replaced, tensors that are replaced, error, words)

PREFIX = "qwen3moe."
FILES: dict[str, tuple[dict[str, Any], dict[str, Change], type[InglenookError], str]] = {
    "more active experts than experts": ({"expert_used_count": 9}, {}, UnsupportedModel, "is 9, but the model has 8"),
    "no experts": ({"expert_count": 0}, {}, UnsupportedModel, "expert_count is 0"),
    "a list of widths for two of three layers": (
        {"expert_feed_forward_length": [64, 64]},
        {},
        UnsupportedModel,
        "expert_feed_forward_length has 2 values",
    ),
    "a list of unlike widths": (
        {"expert_feed_forward_length": [64, 32, 64]},
        {},
        UnsupportedModel,
        "expert_feed_forward_length has 3 values",
    ),
    "a list of zeros": ({"expert_used_count": [0, 0, 0]}, {}, UnsupportedModel, "expert_used_count is 0"),
    "an unknown score": ({"expert_gating_func": 4}, {}, UnsupportedModel, "expert_gating_func = 4"),
    "groups that do not divide the experts": (
        {"expert_group_count": 3},
        {},
        UnsupportedModel,
        "expert_group_count = 3",
    ),
    "fewer experts than the tensors have": ({"expert_count": 7}, {}, ModelFileError, "ffn_gate_inp"),
    "a tensor lacks an expert": ({}, {"blk.1.ffn_up_exps": lambda t: t[1:]}, ModelFileError, r"blk\.1\.ffn_up\.7"),
    "a tensor has two dimensions": ({}, {"blk.1.ffn_up_exps": lambda t: t[0]}, ModelFileError, r"blk\.1\.ffn_up"),
    "a tensor has another width": (
        {},
        {"blk.1.ffn_up_exps": lambda t: t[:, 1:]},
        ModelFileError,
        r"blk\.1\.ffn_up_exps",
    ),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model(EXPERT_FAMILIES["qwen3 moe"], seed=1)


def broken(write: Write, values: dict[str, Any], changes: dict[str, Change]) -> Write:
    """Return a function that replaces values after `write` has written the metadata, and changes tensors."""

    def write_broken(writer: GGUFWriter, config: PreTrainedConfig) -> None:
        write(writer, config)
        for name, value in values.items():
            writer.kv_data[0].pop(PREFIX + name, None)
            add = writer.add_array if isinstance(value, list) else writer.add_uint32
            add(PREFIX + name, value)
        plain: Callable[..., None] = writer.add_tensor

        def add_tensor(name: str, tensor: Any) -> None:
            change, values = changes.get(name.removesuffix(".weight")), torch.from_numpy(tensor)
            plain(name, (change(values) if change else values).contiguous().numpy())

        writer.add_tensor = add_tensor  # type: ignore[method-assign, assignment]

    return write_broken


@pytest.mark.parametrize("name", FILES)
def test_broken_gguf_file_raises_one_error_and_leaks_nothing(model: PreTrainedModel, tmp_path: Path, name: str) -> None:
    values, changes, kind, words = FILES[name]
    form = EXPERT_FAMILIES["qwen3 moe"].gguf
    assert form
    form = replace(form, write=broken(form.write, values, changes))
    refused(write_gguf(tmp_path / "tiny.gguf", model, form), kind, words)
