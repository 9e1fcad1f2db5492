"""The files of a safetensors checkpoint, in one file or two shards, small enough to write by hand."""

import json
from pathlib import Path

import torch
from safetensors.torch import save

from quant.safetensors_shards import INDEX, SINGLE_FILE

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SMALL: dict[str, bytes] = {
    "config.json": b'{"model_type": "llama", "torch_dtype": "bfloat16"}',
    "generation_config.json": b'{"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"eos_token": null}',
    "chat_template.jinja": b"{{ messages }}",
    "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
}
# Files that are never downloaded: code, pickles, and weights in the formats of other programs.
OTHERS: dict[str, bytes] = {
    "README.md": b"# A model",
    "modeling_evil.py": b"import os",
    "pytorch_model.bin": b"\x80\x04pickle",
    "consolidated.safetensors": bytes(200),
    "onnx/model.onnx": bytes(200),
    "original/params.json": b"{}",
}


def whole_files() -> dict[str, bytes]:
    return {**SMALL, SINGLE_FILE: save({"a": torch.arange(40.0)})}


def sharded_files() -> dict[str, bytes]:
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    weights = {name: save({tensor: torch.arange(40.0)}) for name, tensor in zip(SHARDS, "ab", strict=True)}
    return {**SMALL, INDEX: json.dumps(index).encode(), **weights}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder
