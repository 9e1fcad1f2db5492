"""The weight names of transformers checkpoints, against the table of llama.cpp's converter."""

import importlib

import pytest
from gguf.constants import MODEL_ARCH, TENSOR_NAMES
from gguf.tensor_mapping import get_tensor_name_map

from engine.checkpoints.checkpoint import Names

ARCHITECTURES = {
    "bert": MODEL_ARCH.BERT,
    "cohere": MODEL_ARCH.COMMAND_R,
    "ernie": MODEL_ARCH.ERNIE4_5_MOE,
    "gemma": MODEL_ARCH.GEMMA3,
    "glm": MODEL_ARCH.GLM4_MOE,
    "granite": MODEL_ARCH.GRANITE_MOE,
    "llama": MODEL_ARCH.LLAMA,
    "minimax": MODEL_ARCH.MINIMAXM2,
    "mistral": MODEL_ARCH.LLAMA,
    "olmo": MODEL_ARCH.OLMO2,
    "phi3": MODEL_ARCH.PHI3,
    "qwen": MODEL_ARCH.QWEN3,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "stablelm": MODEL_ARCH.STABLELM,
}


def stacked(name: str) -> str:
    """Return the name of the tensor that stacks the matrices of all experts, as llama.cpp's converter writes it."""
    return name.replace(".{e}", "_exps") if name.startswith("blk") else name.replace(".{e}", "")


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_names_match_those_of_the_gguf_package(family: str) -> None:
    names: Names = importlib.import_module(f"engine.models.{family}").NAMES
    table = get_tensor_name_map(ARCHITECTURES[family], 1)
    theirs = {stacked(ours): table.get_name(stacked(name).format(0)) for ours, name in names.stems.items()}
    known = {ours: found for ours, found in theirs.items() if found is not None}
    assert known == {ours: ours.format(0) for ours in known}
    assert len(known) >= 11


def test_all_names_are_gguf_names() -> None:
    written = {name.format(bid="{}") for name in TENSOR_NAMES.values()}
    for family in ARCHITECTURES:
        names: Names = importlib.import_module(f"engine.models.{family}").NAMES
        whole = {ours.rpartition(".")[0] for ours in names.whole.values()}
        assert {stacked(ours) for ours in {*names.stems, *whole}} <= written
