"""GGUF files with random weights, which benchmarks and tests of block types use."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

from app.text import gguf_tokenizer
from engine import models
from engine.checkpoints.metadata import Metadata
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.sampling_params import SamplingParams
from quant.gguf import GGUFFile
from tests.support.random_gguf import DEVIATION, SIZES, TYPES, random_blocks, tensors, write
from tests.support.weight_mixes import Q4_K_M

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", TYPES)
def test_values_of_every_type_have_the_intended_deviation(kind: str) -> None:
    elements, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random_blocks(kind, max(20_000, 640_000 // elements), np.random.default_rng())
    values = gguf.dequantize(np.ascontiguousarray(blocks), gguf.GGMLQuantizationType[kind])
    assert np.isfinite(values).all()
    assert 0.6 * DEVIATION < values.std() < 1.4 * DEVIATION
    assert abs(values.mean()) < 0.02 * DEVIATION
    assert np.abs(values).max() < 10 * DEVIATION


@pytest.mark.parametrize("mix", [*TYPES, Q4_K_M])
def test_every_type_is_read_like_the_gguf_package(tmp_path: Path, mix: str) -> None:
    path, shape = tmp_path / "tiny.gguf", SIZES["tiny"]
    write(path, mix, shape)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with GGUFFile(path) as file:
        assert [(t.name, t.shape, t.type.name) for t in file.tensors.values()] == list(tensors(shape, mix))
        for name in file.tensors:
            assert bytes(file.data(name)) == theirs[name].data.tobytes()
            if name.endswith("norm.weight"):
                assert 0.9 < theirs[name].data.mean() < 1.1
        assert file.path.stat().st_size == max(t.offset + t.nbytes for t in file.tensors.values())
        config = models.read_config(Metadata(file.metadata, "llama"))
        tokenizer = gguf_tokenizer.from_gguf(file.metadata)
    assert (len(config.layers), config.hidden, *config.mlp_widths) == (shape.layers, shape.hidden, shape.mlp_hidden)
    assert tokenizer.vocab_size == config.vocab_size == shape.vocabulary
    assert tokenizer.encode("Grüße") != []


def test_q4_k_m_mix_equals_llama_cpp() -> None:
    """attn_v and ffn_down are Q6_K in 10 of 22 layers: 0, 1, 4, 7, 10, 13, 16, 19, 20, and 21."""
    kinds = {name: kind for name, _, kind in tensors(SIZES["1.1b"], Q4_K_M)}
    precise = [int(name.split(".")[1]) for name, kind in kinds.items() if "attn_v" in name and kind == "Q6_K"]
    assert precise == [0, 1, 4, 7, 10, 13, 16, 19, 20, 21]
    assert precise == [int(name.split(".")[1]) for name, kind in kinds.items() if "down" in name and kind == "Q6_K"]
    assert (kinds["output.weight"], kinds["token_embd.weight"]) == ("Q6_K", "Q4_K")
    assert Counter(kinds.values()) == {"Q4_K": 1 + 22 * 7 - 20, "Q6_K": 21, "F32": 45}


@pytest.mark.parametrize("mix", [*TYPES, Q4_K_M])
def test_output_depends_on_the_prompt(tmp_path: Path, mix: str) -> None:
    """Activations that explode or vanish would make all outputs equal."""
    path = tmp_path / "tiny.gguf"
    write(path, mix, SIZES["tiny"])
    with open_checkpoint(path) as checkpoint:
        engine = load_engine(checkpoint, LoadOptions(backend="reference"))
    params = SamplingParams(temperature=0, max_tokens=1)
    requests = [engine.request((first, first + 100), params, frozenset()) for first in range(10)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert len({tuple(request.output_ids) for request in requests}) > 5


def test_command_line_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    command = [sys.executable, "-m", "tests.support.random_gguf", str(path), "--mix", "q4_k_m", "--size", "tiny"]
    subprocess.run(command, check=True, cwd=ROOT)
    assert 0 < path.stat().st_size < 5_000_000
    with GGUFFile(path) as file:
        assert file.tensors["output.weight"].type.name == "Q6_K"
