"""Float checkpoints that are quantized while they load."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from engine import models
from engine.backends.reference import ReferenceOperations
from engine.checkpoints.weights import Weights
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from quant.cpu.layouts import packing_of
from quant.errors import UnsupportedQuantization
from quant.kernels.reference import dequantize
from quant.quantize import fp8, int4, nf4
from quant.tensor import PlainTensor, QTensor
from tests.engine.checkpoints.quantized_folders import quantized_folder
from tests.engine.models.test_llama import forward, poisoned_cache, prompt, request
from tests.engine.models.tiny_llama import TinyLlama, make

METHODS: dict[str, Callable[[PlainTensor], QTensor]] = {"fp8": fp8, "int4": partial(int4, group=64), "nf4": nf4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return make(tmp_path_factory.mktemp("tiny"), heads=4, kv_heads=2, head_dim=32, hidden=64, mlp=128)


@pytest.fixture(scope="module", params=["folder", "GGUF"])
def source(request: pytest.FixtureRequest, tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "GGUF":
        return tiny.path
    folder = tmp_path_factory.mktemp("folder")
    tiny.reference.save_pretrained(folder)
    return folder


def taken(path: Path, method: str | None) -> dict[str, QTensor]:
    with open_checkpoint(path, method) as checkpoint:
        return {name: weight.decode() for name, weight in models.stored_weights(checkpoint).items()}


@pytest.mark.parametrize("method", METHODS)
def test_only_linear_layers_of_blocks_are_quantized(source: Path, method: str) -> None:
    plain, quantized = taken(source, None), taken(source, method)
    assert plain.keys() == quantized.keys()
    changed = 0
    for name, weight in quantized.items():
        before = plain[name]
        assert isinstance(before, PlainTensor)
        if name.startswith("blk.") and not name.endswith("norm.weight"):
            changed += 1
            assert not isinstance(weight, PlainTensor)
            assert torch.equal(dequantize(weight), dequantize(METHODS[method](before)))
        else:
            assert isinstance(weight, PlainTensor)
            assert torch.equal(weight.values, before.values)
    assert changed == 3 * 7


@pytest.mark.parametrize("method", METHODS)
def test_logits_equal_a_model_with_quantized_values(tiny: TinyLlama, tmp_path: Path, method: str) -> None:
    tiny.reference.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path, method) as checkpoint:
        stored = models.stored_weights(checkpoint)
        weights = Weights(checkpoint.path, stored)
        operations = ReferenceOperations(keep_dequantized=True)
        model = models.load(models.read_config(checkpoint.metadata), weights, operations, 512)
        values = {weight.name: dequantize(weight.decode()) for weight in stored.values()}
    rounded = copy.deepcopy(tiny.reference)
    rounded.load_state_dict(values)
    ids = prompt(40, seed=1)
    logits = forward(model, poisoned_cache(model), [(request(1, ids, range(1, 5)), 40)])[0]
    with torch.inference_mode():
        torch.testing.assert_close(logits, rounded(torch.tensor([ids])).logits[0, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_samples_have_the_layout_of_their_weights(source: Path, method: str) -> None:
    with open_checkpoint(source, method) as checkpoint:
        for weight in models.stored_weights(checkpoint).values():
            if weight.shape and len(weight.shape) == 2:
                assert packing_of(weight.sample()).layout == packing_of(weight.decode()).layout


def test_kv_caches_are_not_shared_between_methods(source: Path) -> None:
    salts = set()
    for method in (None, *METHODS):
        with open_checkpoint(source, method) as checkpoint:
            options = LoadOptions(backend="reference", fingerprint="the file's")
            salts.add(load_engine(checkpoint, options).config.cache_salt)
    assert len(salts) == 4


def test_already_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    made = quantized_folder(tmp_path, "AWQ")
    with open_checkpoint(made.path, "int4") as checkpoint, pytest.raises(UnsupportedQuantization, match="already"):
        load_engine(checkpoint, LoadOptions(backend="reference"))
    gguf = make(tmp_path, types={"ffn_down": "Q8_0"})  # one of its matrices is quantized already
    with open_checkpoint(gguf.path, "fp8") as checkpoint:
        stored = models.stored_weights(checkpoint)
    assert stored["blk.0.ffn_down.weight"].sample().type_name == "Q8_0"
    assert stored["blk.0.ffn_up.weight"].sample().type_name == "F8_E4M3"
