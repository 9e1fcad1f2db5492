"""Checkpoints of every quantization format in the engine: the model computes with the dequantized values."""

from pathlib import Path

import pytest
import torch

from engine import models
from engine.backends.reference import ReferenceOperations
from engine.checkpoints.weights import Weights, matrix_samples
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.models import Model
from quant.cpu.layouts import layouts_of
from quant.errors import UnsupportedQuantization
from tests.engine.answers import answer
from tests.engine.checkpoints.quantized_folders import KINDS, QuantizedFolder, edit_config, quantized_folder
from tests.engine.models.test_llama import forward, poisoned_cache, prompt, request


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> QuantizedFolder:
    return quantized_folder(tmp_path_factory.mktemp("quantized"), request.param)


def load(path: Path, *, keep_dequantized: bool) -> Model:
    with open_checkpoint(path) as opened:
        weights = Weights(opened.path, models.stored_weights(opened))
        operations = ReferenceOperations(keep_dequantized=keep_dequantized)
        return models.load(models.read_config(opened.metadata), weights, operations, 512)


def test_logits_equal_the_dequantized_model(checkpoint: QuantizedFolder) -> None:
    ids = prompt(40, seed=1)
    with torch.inference_mode():
        expected = checkpoint.reference(torch.tensor([ids])).logits[0, -1]
    for keep in (True, False):
        model = load(checkpoint.path, keep_dequantized=keep)
        logits = forward(model, poisoned_cache(model), [(request(1, ids, range(1, 5)), 40)])
        torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def test_cpu_kernels_generate_the_reference_tokens(checkpoint: QuantizedFolder, cpu_kernels: Path) -> None:
    plain = answer(checkpoint.path, LoadOptions(backend="reference"))
    fast = answer(checkpoint.path, LoadOptions(backend="cpu", activation_bits=14, code_cache=cpu_kernels))
    assert (plain[0], fast[0]) == ("reference", "cpu")
    assert fast[1] == plain[1]


def test_layers_may_have_different_schemes(tmp_path: Path) -> None:
    """The layers' tensors have the same names and dtypes, but different layouts. The samples that are read before
    loading must cover all layouts.
    """
    folder = quantized_folder(tmp_path, "pack-quantized, symmetric", "pack-quantized, 8 bits, channels").path
    with open_checkpoint(folder) as opened:
        stored = models.stored_weights(opened)
        matrices = [weight.decode() for name, weight in stored.items() if not name.endswith("norm.weight")]
        assert layouts_of(matrix_samples(stored)) == layouts_of(matrices)
    assert {"CT-INT4", "CT-INT8"} <= {matrix.type_name for matrix in matrices}


def test_progress_ends_with_all_bytes_of_the_file(checkpoint: QuantizedFolder) -> None:
    done: list[tuple[int, int]] = []
    with open_checkpoint(checkpoint.path) as opened:
        load_engine(opened, LoadOptions(backend="reference"), lambda at, total: done.append((at, total)))
    assert done[-1][0] == done[-1][1]
    header = 8 + int.from_bytes((checkpoint.path / "model.safetensors").read_bytes()[:8], "little")
    assert done[-1][1] == (checkpoint.path / "model.safetensors").stat().st_size - header


def test_quantized_layer_without_config_section_is_refused(tmp_path: Path) -> None:
    made = quantized_folder(tmp_path, "AWQ")
    edit_config(made.path, quantization_config=None)
    with pytest.raises(UnsupportedQuantization, match="quantization_config"):
        load(made.path, keep_dequantized=True)


@pytest.mark.parametrize("section", [{"quant_method": "exl3"}, {"quant_method": 4}, {}, "gptq", [1]])
def test_unknown_quantization_method_is_refused(tmp_path: Path, section: object) -> None:
    made = quantized_folder(tmp_path, "AWQ")
    edit_config(made.path, quantization_config=section)
    named = section["quant_method"] if isinstance(section, dict) and section.get("quant_method") == "exl3" else "gptq"
    with pytest.raises(UnsupportedQuantization, match=str(named)):
        load(made.path, keep_dequantized=True)
