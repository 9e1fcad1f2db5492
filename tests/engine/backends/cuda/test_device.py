"""Sizing of the KV cache on a GPU, after the largest step and all graphs have been measured."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from engine import models
from engine.backends.cuda.device import CudaDevice, CudaOptions
from engine.backends.cuda.gpu import Gpu, PlannedGpu
from engine.backends.cuda.memory import GpuMemory
from engine.backends.cuda.operations import CudaOperations
from engine.backends.cuda.step import CudaStep
from engine.checkpoints.weights import Weights
from engine.config import EngineConfig, GroupConfig
from engine.loading import open_checkpoint
from engine.model_config import ModelConfig
from quant.cuda.backend import CudaBackend
from tests.engine.backends.cuda.two_devices import INTERPRETED
from tests.engine.models.tiny_llama import make
from tests.kernels.cards import CARDS
from tests.kernels.shapes import LLAMA_8B

CONFIG = EngineConfig("cuda", 64, 12, max_step_tokens=32, max_running=4, groups=(GroupConfig(),))


def test_pools_that_cannot_be_allocated_are_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def allocate(_device: CudaDevice, _loaded: object, config: EngineConfig) -> int:
        sizes.append(config.num_blocks)
        if config.num_blocks > limit:
            raise torch.OutOfMemoryError("fragmented")
        return config.num_blocks

    monkeypatch.setattr(CudaDevice, "_step", allocate)
    device, config = CudaDevice(Gpu(INTERPRETED), CudaOptions()), replace(CONFIG, num_blocks=1000)
    limit = 960
    largest: object = device._largest_step(cast(models.Model, None), config)
    assert largest == 940
    assert sizes == [1000, 970, 940]
    limit = 10
    with pytest.raises(torch.OutOfMemoryError):
        device._largest_step(cast(models.Model, None), config)


def test_kv_cache_is_sized_after_the_graphs_were_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def note(name: str, value: int) -> int:
        events.append(name)
        return value

    monkeypatch.setattr(Gpu, "peak_memory", lambda *_: note("largest step", 5))
    monkeypatch.setattr(CudaStep, "capture", lambda *_: note("graphs", 0))
    monkeypatch.setattr(GpuMemory, "kv_bytes_after_loading", lambda _, step: note(f"pools beside {step}", 1 << 20))
    device = CudaDevice(Gpu(INTERPRETED), CudaOptions())
    with open_checkpoint(make(tmp_path, heads=2, kv_heads=1, layers=1).path) as checkpoint:
        weights = Weights(checkpoint.path, models.stored_weights(checkpoint))
        backend = CudaBackend(torch.device("cpu"), INTERPRETED, deterministic=False)
        operations = CudaOperations(backend, INTERPRETED, deterministic=False)
        loaded = models.load(models.read_config(checkpoint.metadata), weights, operations, 64)
    assert device._fitting_pools(loaded, CONFIG)[0] > 4
    assert events == ["largest step", "graphs", "pools beside 5"]


@pytest.mark.parametrize(
    ("name", "elements", "deterministic", "bits", "uses_integers"),
    [
        ("RTX 3090", 10**9, False, 0, True),
        ("RTX 4090", 10**9, False, 0, True),
        ("RTX 5090", 10**9, False, 0, True),
        ("RTX 4090", 10**8, False, 0, False),  # rounding has the largest effect in small models
        ("RTX 4090", 10**8, False, 8, True),
        ("RTX 4090", 10**9, False, 14, False),
        ("RTX 4090", 10**9, True, 8, False),
        ("H100", 10**9, False, 8, False),
        ("GB10", 10**9, False, 0, False),
    ],
)
def test_prompts_of_large_models_are_in_integers_on_geforce_cards(
    monkeypatch: pytest.MonkeyPatch, name: str, elements: int, deterministic: bool, bits: int, uses_integers: bool
) -> None:
    backends: list[CudaBackend] = []

    def note(backend: CudaBackend, *_: object, **__: object) -> CudaBackend:
        backends.append(backend)
        return backend

    monkeypatch.setattr("engine.backends.cuda.device.CudaOperations", note)
    monkeypatch.setattr(models, "load", lambda *_: None)
    monkeypatch.setattr(ModelConfig, "matrix_elements", elements)
    card = next(it for it in CARDS if it.name.endswith(name))
    device = CudaDevice(PlannedGpu(card), CudaOptions(deterministic=deterministic, activation_bits=bits))
    device._loaded(LLAMA_8B, cast(Weights, None), CONFIG)
    assert [it.integer_prompts for it in backends] == [uses_integers]


@pytest.mark.parametrize(("name", "tokens"), [("A100", 1024), ("RTX 3090", 2048), ("RTX 4090", 4096), ("H100", 4096)])
def test_largest_step_of_a_prompt_depends_on_the_rate_of_the_card(name: str, tokens: int) -> None:
    card = next(it for it in CARDS if it.name.endswith(name))
    assert CudaDevice(PlannedGpu(card), CudaOptions()).step_tokens(LLAMA_8B) == tokens
