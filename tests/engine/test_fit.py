"""Memory and context that are predicted for a model, compared with those of the loaded engine."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine import models
from engine.backends.cpu.device import CpuDevice, CpuStep
from engine.backends.cpu.memory import packed_bytes
from engine.backends.device_choice import host_device
from engine.checkpoints.checkpoint import Names
from engine.checkpoints.weights import Weights
from engine.config import BLOCK_SIZE, CHECKPOINT_TOKENS, MemoryLimit
from engine.errors import OutOfMemory
from engine.fit import fit
from engine.kv.budget import MIN_CACHED_STATES, RUNNING_STATES, group_config
from engine.load_options import LoadOptions
from engine.loading import _resolve, load_engine, open_checkpoint
from engine.model_config import ModelConfig
from tests.app.models import tiny_chat
from tests.engine.checkpoints.quantized_folders import KINDS, quantized_folder
from tests.engine.models import family_checkpoints, tiny_bert
from tests.engine.models.family import WINDOW
from tests.engine.models.tiny_llama import MIXES, make
from tests.kernels.shapes import layer

WHOLE = 512  # context length of the tiny models, in tokens


@pytest.mark.parametrize("head_dim", [16, 32], ids=["reference kernels", "CPU kernels"])
def test_context_equals_that_of_the_loaded_engine(tmp_path: Path, head_dim: int, cpu_kernels: Path) -> None:
    """Covers enough memory, slightly too little memory, and a requested context."""
    with open_checkpoint(make(tmp_path, head_dim=head_dim).path) as checkpoint:
        roomy = fit(checkpoint, LoadOptions(), memory=1 << 30)
        assert [cache.kv_type for cache in roomy.caches] == (["f16", "int8"] if head_dim == 32 else ["f32"])
        assert {cache.context for cache in roomy.caches} == {WHOLE}
        assert (roomy.wanted, roomy.least, roomy.is_possible) == (WHOLE, WHOLE, True)
        scarce = roomy.needs.total + roomy.caches[0].size // 2
        narrow = fit(checkpoint, LoadOptions(), memory=scarce)
        assert not narrow.is_possible
        contexts = [cache.context for cache in narrow.caches]
        assert 0 < contexts[0] < WHOLE
        assert contexts == sorted(contexts)
        tight = fit(checkpoint, LoadOptions(context_length=100), memory=scarce)
        assert tight.is_possible
        options = LoadOptions(context_length=100, host_memory=scarce, code_cache=cpu_kernels)
        assert load_engine(checkpoint, options).config.context_length == tight.caches[0].context == 100


def test_model_that_does_not_fit_is_rejected_before_reading_weights(tmp_path: Path) -> None:
    read: list[int] = []
    with open_checkpoint(make(tmp_path).path) as checkpoint:
        found = fit(checkpoint, LoadOptions(), memory=1 << 30)
        short = LoadOptions(host_memory=found.needs.total)
        assert not fit(checkpoint, LoadOptions(), memory=found.needs.total).has_room
        with pytest.raises(OutOfMemory, match=r"The model needs 0\.\d GB of memory"):
            load_engine(checkpoint, short, lambda done, total: read.append(done))
    assert not read


def test_int8_cache_holds_nearly_twice_the_context_of_f16(tmp_path: Path) -> None:
    with open_checkpoint(make(tmp_path, head_dim=32).path) as checkpoint:
        config = replace(
            models.read_config(checkpoint.metadata), layers=(layer(4, 2, 64, 64),) * 30, context_length=1 << 20
        )
        engines = [
            _resolve(config, _device(checkpoint_path=tmp_path, config=config, kv_type=name), LoadOptions(), (), 1000)
            for name in ("f16", "int8")
        ]
    assert 1.85 < engines[1].context_length / engines[0].context_length < 1.9


def _device(checkpoint_path: Path, config: ModelConfig, kv_type: str) -> CpuDevice:
    device = host_device(LoadOptions(kv_type=kv_type, host_memory=1 << 30), config, checkpoint_path, {})
    assert isinstance(device, CpuDevice)
    return device


GGUF = {f"GGUF {name}": types for name, types in MIXES.items()}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", [*GGUF, *KINDS])
def test_predicted_weight_bytes_match_loaded_bytes(tmp_path: Path, name: str, cpu_kernels: Path) -> None:
    if name in GGUF:
        path = make(tmp_path, head_dim=32, types=GGUF[name], mlp=192, hidden=128, vocab=1000).path
    else:
        path = quantized_folder(tmp_path, name).path
    with open_checkpoint(path) as checkpoint:
        model, stored = models.read_config(checkpoint.metadata), models.stored_weights(checkpoint)
        device = host_device(LoadOptions(host_memory=1 << 30, code_cache=cpu_kernels), model, path, stored)
        config = _resolve(model, device, LoadOptions(), (), 0)
        step = device.load(model, Weights(path, stored), config).compute
        assert isinstance(step, CpuStep)
        names = ("weight", "order", "constant")
        held = sum(region.size for region, _ in step.arena._regions if region.name in names)
        tables = sum(4 * rope.dimensions for rope in model.ropes) * config.context_length
        told = packed_bytes(stored)
    # In the tiles of narrow matrices, the header is a large part of the bytes.
    assert abs(told + tables - held) < 0.03 * held + 3 * 4096


def test_token_bytes_are_listed_per_window(tmp_path: Path) -> None:
    path = family_checkpoints.make(tmp_path, "gemma3", "folder").path
    with open_checkpoint(path) as checkpoint:
        (cache, *_) = fit(checkpoint, LoadOptions(), memory=1 << 30).caches
        model = models.read_config(checkpoint.metadata)
    assert set(cache.token_bytes) == {None, WINDOW}
    windowed = sum(group_config(layer.mixer.cache).window is not None for layer in model.layers)
    one_layer = cache.token_bytes[None] // (len(model.layers) - windowed)
    assert cache.token_bytes[WINDOW] == windowed * one_layer


def test_states_are_counted(tmp_path: Path) -> None:
    """Four layers of two kinds: two convolutions of 128 channels that keep two inputs, and two of attention."""
    path = family_checkpoints.make(tmp_path, "lfm2", "folder").path
    with open_checkpoint(path) as checkpoint:
        (cache, *_) = fit(checkpoint, LoadOptions(context_length=512), memory=1 << 30).caches
    assert (cache.state_bytes, cache.spacing) == (2 * 2 * 128 * 4, CHECKPOINT_TOKENS)
    keys = cache.token_bytes[None] * (512 + BLOCK_SIZE)  # the null block included
    states = (cache.size - cache.tables - keys) // cache.state_bytes
    assert states == 1 + RUNNING_STATES + MIN_CACHED_STATES


def test_embedding_model_needs_only_its_weights(tmp_path: Path) -> None:
    with open_checkpoint(tiny_bert.make(tmp_path).folder) as checkpoint:
        found = fit(checkpoint, LoadOptions(), memory=1 << 30)
        assert (found.caches, found.is_possible) == ((), True)
        held = sum(weight.nbytes for weight in checkpoint.weights(Names({})).values())
        assert found.needed == found.needs.weights == held > 0
        assert not fit(checkpoint, LoadOptions(), memory=held).is_possible


def test_fit_is_estimated_for_an_absent_gpu(tmp_path: Path) -> None:
    options = LoadOptions(device="cuda")
    with open_checkpoint(make(tmp_path, head_dim=32).path) as checkpoint:
        found = fit(checkpoint, options, memory=8 * 10**9)
        assert (found.device, found.is_possible) == ("cuda", True)
        assert [cache.kv_type for cache in found.caches] == ["bf16", "f16", "fp8"]
        assert found.caches[2].token_bytes[None] * 2 == found.caches[0].token_bytes[None]
        assert 0.4 < found.kv_limit / (found.memory - found.needs.total) < 0.6
        assert not fit(checkpoint, replace(options, gpu_memory=MemoryLimit(share=0.9)), memory=8 * 10**9).kv_limit
        assert found.memory < 8 * 10**9  # part of the memory is reserved for the display
        assert not fit(checkpoint, options, memory=10**8).has_room


def test_quantizing_on_load_reduces_the_bytes(tmp_path: Path) -> None:
    tiny_chat.save(tmp_path)
    sizes = []
    for method in (None, "int4"):
        with open_checkpoint(tmp_path, method) as checkpoint:
            sizes.append(packed_bytes(models.stored_weights(checkpoint)))
    assert sizes[1] < sizes[0]
