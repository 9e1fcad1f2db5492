"""`ingle show`: details of a model, from its headers only."""

import json
import math
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from app.cli import ingle
from tests.app.models.checkpoint_folder import whole_files, write
from tests.app.models.tiny_chat import save
from tests.engine.checkpoints.quantized_folders import edit_config
from tests.engine.models.family_checkpoints import make, make_wrapped_qwen


def show(*arguments: str) -> Result:
    return CliRunner().invoke(ingle, ["show", *arguments], catch_exceptions=False)


def as_json(path: Path) -> dict[str, object]:
    return dict(json.loads(show(str(path), "--json").output))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-chat")
    save(path, shard_size="40KB", temperature=0.6, top_p=0.9, do_sample=True)
    (path / "README.md").write_text("---\nbase_model: x\nlicense: apache-2.0\ntags:\n---\n# license: none\n")
    return path


def test_details_of_a_gguf_file_are_read(smollm2: Path) -> None:
    shown = as_json(smollm2)
    assert (shown["architecture"], shown["context_length"], shown["vocab_size"]) == ("llama", 8192, 49152)
    assert (shown["parameters"], shown["size"], shown["quantization"]) == (134_515_008, 98_362_432, "Q4_1")
    assert shown["template"] == {"system": True, "tools": False, "thinking": False}
    assert shown["license"] == "apache-2.0"
    classes = {part["name"]: part for part in shown["tensors"]}  # type: ignore[attr-defined]
    assert list(classes) == ["embedding", "attention", "MLP", "norms"]
    assert {name: list(part["types"]) for name, part in classes.items()} == {
        "embedding": ["Q8_0"],
        "attention": ["Q4_1"],
        "MLP": ["Q4_1"],
        "norms": ["F32"],
    }


def test_experts_and_unused_tensors_are_counted(tmp_path: Path) -> None:
    """Each of 8 experts has 3 matrices of 64 x 128 in 2 layers, and 3 of 8 compute a token."""
    make(tmp_path, "glm moe", "folder")
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | {"model.layers.3.eh_proj.weight": torch.ones(128, 256)}, tmp_path / "model.safetensors")
    edit_config(tmp_path, num_nextn_predict_layers=1)
    shown, parameters = as_json(tmp_path), sum(math.prod(it.shape) for it in stored.values())
    assert shown["parameters"] == parameters
    assert shown["active_parameters"] == parameters - 2 * 5 * 3 * 64 * 128
    classes = {part["name"]: part for part in shown["tensors"]}  # type: ignore[attr-defined]
    assert (classes["unused"]["tensors"], classes["unused"]["parameters"]) == (1, 128 * 256)
    active = f"{parameters:,}, of which about {parameters - 245_760:,} compute each token"
    assert active in show(str(tmp_path)).output


def test_vision_and_draft_tensors_are_counted_as_unused(tmp_path: Path) -> None:
    tiny = make_wrapped_qwen(tmp_path)
    vision = [it for name, it in tiny.reference.state_dict().items() if ".visual." in name]
    classes = {part["name"]: part for part in as_json(tmp_path)["tensors"]}  # type: ignore[attr-defined]
    unused = (len(vision) + 1, sum(it.numel() for it in vision) + 128 * 256)
    assert (classes["unused"]["tensors"], classes["unused"]["parameters"]) == unused


def test_sampling_comes_from_the_files_the_catalog_or_the_default(folder: Path, smollm2: Path, tmp_path: Path) -> None:
    (unknown := tmp_path / "unknown.gguf").symlink_to(smollm2)
    for path, sampling in (
        (folder, "temperature 0.6, top_p 0.9"),
        (smollm2, "temperature 0, repetition_penalty 1.1"),
        (unknown, "temperature 0.7, top_p 0.95 (the model recommends none)"),
    ):
        assert re.search(rf"^SAMPLING +{re.escape(sampling)}$", show(str(path)).output, re.MULTILINE)


def test_details_of_a_folder_are_read(folder: Path) -> None:
    shown = as_json(folder)
    assert (shown["architecture"], shown["context_length"], shown["vocab_size"]) == ("llama", 256, 300)
    embedding, layer, mlp = 300 * 32, 32 * 32 * 2 + 32 * 16 * 2, 3 * 32 * 64
    assert shown["parameters"] == 2 * embedding + 2 * (layer + mlp + 2 * 32) + 32
    assert (shown["quantization"], shown["license"]) == ("float32", "apache-2.0")
    assert shown["sampling"] == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    assert shown["template"] == {"system": True, "tools": False, "thinking": False}
    assert [part["name"] for part in shown["tensors"]] == ["embedding", "attention", "MLP", "norms", "head"]  # type: ignore[attr-defined]


def test_details_are_printed_as_a_table(folder: Path) -> None:
    lines = show(str(folder)).output.splitlines()
    facts = dict(line.split(None, 1) for line in lines[: lines.index("")] if line.split()[0] != "CHAT")
    assert facts["ARCHITECTURE"] == "llama"
    assert facts["CONTEXT"] == "256 tokens"
    assert facts["SAMPLING"].startswith("temperature 0.6, top_p 0.9")
    assert lines[lines.index("") + 1].split() == ["CLASS", "TENSORS", "PARAMETERS", "SIZE", "TYPES"]
    assert lines[-1].split()[:3] == ["head", "1", "9,600"]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": 3, "max_position_embeddings": "many", "vocab_size": -1, "quantization_config": []},
        {"text_config": {"vocab_size": [1]}, "quantization_config": {"quant_method": {}, "bits": 99}},
        {"model_type": "\x1b]0;owned\x07"},
    ],
)
def test_invalid_config_values_are_not_shown(tmp_path: Path, config: object) -> None:
    write(tmp_path, {**whole_files(), "config.json": json.dumps(config).encode()})
    shown = as_json(tmp_path)
    assert (shown["context_length"], shown["vocab_size"], shown["quantization"]) == (None, None, "F32")
    assert "\x1b" not in show(str(tmp_path)).output


def test_vision_model_is_described_by_its_text_config(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 4096, "vocab_size": 1000}
    config = {"model_type": "seeing", "vocab_size": 7, "text_config": text}
    write(tmp_path, {**whole_files(), "config.json": json.dumps(config).encode()})
    shown = as_json(tmp_path)
    assert (shown["architecture"], shown["context_length"], shown["vocab_size"]) == ("seeing", 4096, 1000)


def test_fit_is_shown_on_request(folder: Path) -> None:
    fit = json.loads(show(str(folder), "--fit", "--json").output)["fit"]
    assert (fit["fits"], fit["wanted_context"], fit["is_stored"]) == (True, 256, True)
    assert "MEMORY         fits: 256 context" in show(str(folder), "--fit").output
    assert "fit" not in as_json(folder)


def test_fill_in_the_middle_is_detected(tmp_path: Path) -> None:
    write(tmp_path, {**whole_files(), "tokenizer.json": b'{"added_tokens": [{"content": "<|fim_prefix|>"}]}'})
    assert as_json(tmp_path)["fills_in_the_middle"] is True
    assert "fill in the middle" in show(str(tmp_path)).output


def test_missing_model_is_not_found() -> None:
    command = [sys.executable, "-m", "app", "show", "no-such-model"]
    assert subprocess.run(command, capture_output=True, check=False, cwd=Path(__file__).parents[3]).returncode == 3


def test_show_imports_no_heavy_modules(folder: Path) -> None:
    code = f"""
import sys
from app.cli import ingle
ingle.main(["show", {str(folder)!r}, "--json"], standalone_mode=False)
print(sorted({{"torch", "numba", "transformers", "huggingface_hub"}} & sys.modules.keys()))
"""
    command = [sys.executable, "-c", code]
    shown = subprocess.check_output(command, text=True, cwd=Path(__file__).parents[3])
    assert shown.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 0),
        ("rms_norm_eps", 0.0),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 2**31),
        ("model_type", "unheard"),
    ],
)
def test_show_names_unsupported_values(folder: Path, tmp_path: Path, key: str, value: object) -> None:
    assert as_json(folder)["problem"] == ""
    changed = shutil.copytree(folder, tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    config.pop("rope_parameters", None)
    (changed / "config.json").write_text(json.dumps({**config, key: value}))
    assert ("unheard" if key == "model_type" else key) in str(as_json(changed)["problem"])
    assert "PROBLEM" in show(str(changed)).output


def test_show_names_a_gguf_value_that_is_not_finite(smollm2: Path, tmp_path: Path) -> None:
    epsilon, rope = b"llama.attention.layer_norm_rms_epsilon", b"llama.rope.freq_base"
    content = smollm2.read_bytes()
    for key in (epsilon, rope):
        value = content.index(key) + len(key) + 4  # a 4-byte type is between the key and its float32
        changed = tmp_path / "changed.gguf"
        for number in (float("nan"), float("inf"), 0.0):
            changed.write_bytes(content[:value] + struct.pack("<f", number) + content[value + 4 :])
            assert key.decode() in str(as_json(changed)["problem"])
