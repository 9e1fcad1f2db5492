from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import loading, models
from engine.backends import device_choice
from engine.backends.cpu.device import CpuDevice
from engine.backends.device_choice import float32_bytes
from engine.backends.reference import ReferenceDevice
from engine.config import BLOCK_SIZE, default_activation_bits
from engine.device import Device
from engine.errors import UnsupportedModel
from engine.kv import budget
from engine.kv.budget import KVBudget
from engine.kv.cache import KVCache, kv_groups
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.model_config import ModelConfig
from quant.cpu.tiers import choose
from tests.engine.answers import answer
from tests.engine.models.tiny_llama import make
from tests.kernels.shapes import layer
from tests.support.gguf_bytes import small_file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny")).path


def test_low_memory_gives_the_same_tokens(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plenty = answer(tiny, LoadOptions())
    monkeypatch.setattr(device_choice, "float32_bytes", lambda model: 1 << 60)
    assert answer(tiny, LoadOptions()) == plenty


def test_progress_counts_all_tensor_bytes(tiny: Path) -> None:
    reports: list[tuple[int, int]] = []
    with open_checkpoint(tiny) as checkpoint:
        load_engine(checkpoint, LoadOptions(), lambda done, total: reports.append((done, total)))
        total = sum(weight.nbytes for weight in models.stored_weights(checkpoint).values())
    assert reports[-1] == (total, total)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


@pytest.mark.parametrize(("asked", "given"), [(0, 512), (100, 100), (10_000, 512)])
def test_context_is_limited_to_the_models_own(tiny: Path, asked: int, given: int) -> None:
    with open_checkpoint(tiny) as checkpoint:
        assert load_engine(checkpoint, LoadOptions(context_length=asked)).config.context_length == given


def test_float32_estimate_is_close_to_the_weights(tiny: Path) -> None:
    with open_checkpoint(tiny) as checkpoint:
        config = models.read_config(checkpoint.metadata)
        assert (
            0.9
            < float32_bytes(config) / sum(weight.nbytes for weight in models.stored_weights(checkpoint).values())
            < 1.1
        )


def test_large_models_use_8_bit_activations(tiny: Path) -> None:
    with open_checkpoint(tiny) as checkpoint:
        small = models.read_config(checkpoint.metadata)
    large = replace(small, layers=(layer(32, 4, 64, 5632),) * 22, hidden=2048)
    assert [default_activation_bits(it.matrix_elements) for it in (small, large)] == [14, 8]


def test_unknown_backend_is_rejected(tiny: Path) -> None:
    with open_checkpoint(tiny) as checkpoint, pytest.raises(UnsupportedModel, match="'abacus'"):
        load_engine(checkpoint, LoadOptions(backend="abacus"))


def test_file_without_a_model_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_file().data)
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsupportedModel, match=r"llama\."):
        load_engine(checkpoint, LoadOptions())


def test_context_is_reduced_to_fit_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_checkpoint(tiny) as checkpoint:
        config = models.read_config(checkpoint.metadata)
        needed = budget_of(config, ReferenceDevice(keep_dequantized=True, threads=1)).bytes(511)
        monkeypatch.setattr(budget, "available_memory", lambda: 2 * needed)
        monkeypatch.setattr(budget, "MIN_CONTEXT", 100)
        engine = load_engine(checkpoint, LoadOptions())
        assert (engine.config.context_length, engine.config.model_context_length) == (511, 512)
        assert engine.config.longest_context == 511
        shorter = load_engine(checkpoint, LoadOptions(context_length=300)).config
        assert (shorter.context_length, shorter.longest_context) == (300, 511)
        with pytest.raises(UnsupportedModel, match="511 tokens fit"):
            load_engine(checkpoint, LoadOptions(context_length=512))
        monkeypatch.setattr(budget, "MIN_CONTEXT", 512)
        with pytest.raises(UnsupportedModel, match="511 tokens fit"):
            load_engine(checkpoint, LoadOptions())


def budget_of(config: ModelConfig, device: Device) -> KVBudget:
    return KVBudget(config, kv_groups(config, device.layer_block), 256)


def config_of(path: Path) -> ModelConfig:
    with open_checkpoint(path) as checkpoint:
        return models.read_config(checkpoint.metadata)


DEVICES = {
    "reference": ReferenceDevice(keep_dequantized=True, threads=1),
    "cpu": CpuDevice(1, 14, choose("auto"), None),
    "cpu, int8": CpuDevice(1, 14, choose("auto"), None, torch.int8),
}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_budget_equals_the_allocated_bytes(tmp_path: Path, device: Device) -> None:
    config = config_of(make(tmp_path, head_dim=32).path)
    (pool,) = KVCache(kv_groups(config, device.layer_block), [10]).pools
    rotary = config.ropes[0].dimensions * 4
    budget = budget_of(config, device)
    assert pool.nbytes // (10 * BLOCK_SIZE) + rotary == (budget.bytes(320) - budget.bytes(160)) // 160


def test_int8_cache_gives_nearly_twice_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(
        config_of(make(tmp_path, head_dim=32).path), layers=(layer(4, 2, 64, 64),) * 30, context_length=1 << 20
    )
    monkeypatch.setattr(budget, "available_memory", lambda: 1 << 30)
    floats, integers = (
        loading._resolve(config, CpuDevice(1, 14, choose("auto"), None, kv_type), LoadOptions(), ())
        for kv_type in (torch.float16, torch.int8)
    )
    assert 1.85 < integers.context_length / floats.context_length < 1.9
    assert 1.85 < integers.num_blocks / floats.num_blocks < 1.9
    assert integers.cache_salt != floats.cache_salt


def test_windowed_layers_need_blocks_for_their_window_only(tmp_path: Path) -> None:
    """With ten times the context, layers without a window need ten times the blocks, and windowed layers no more."""
    plain = config_of(make(tmp_path, head_dim=32).path)
    config = replace(plain, layers=tuple(layer(4, 2, 32, 64, window) for window in (64, None, 64)))
    device = ReferenceDevice(keep_dequantized=True, threads=1)
    short, long = (budget_of(config, device).groups(context) for context in (160_000, 1_600_000))
    assert [group.window for group in short] == [group.window for group in long] == [None, 64]
    assert (short[0].num_blocks, long[0].num_blocks) == (10_001, 100_001)
    assert short[1].num_blocks == long[1].num_blocks > 16 * (64 + 256) // BLOCK_SIZE
    pools = [(group.window, group.num_blocks) for group in budget_of(config, device).groups(320)]
    assert pools == [(None, 21), (64, 21)]


def test_unsupported_kv_type_is_rejected(tiny: Path) -> None:
    with open_checkpoint(tiny) as checkpoint:
        with pytest.raises(UnsupportedModel, match="'f12'"):
            load_engine(checkpoint, LoadOptions(kv_type="f12"))
        for kv_type in ("f16", "int8"):
            with pytest.raises(UnsupportedModel, match=kv_type) as refusal:
                load_engine(checkpoint, LoadOptions(backend="reference", kv_type=kv_type))
            assert "INGLE_KV_TYPE=auto" in str(refusal.value.remedy)


def test_rope_base_changes_the_cache_salt(tiny: Path, tmp_path: Path) -> None:
    """Two files differ only in their rope base, so they must not share blocks."""
    salts = set()
    other = make(tmp_path, linear_factor=4.0).path
    for path in (tiny, tiny, other):
        with open_checkpoint(path) as checkpoint:
            salts.add(load_engine(checkpoint, LoadOptions()).config.cache_salt)
    assert len(salts) == 2


def test_loading_does_not_collect_garbage(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection would visit every object of the process."""
    collected: list[bool] = []
    monkeypatch.setattr("gc.collect", lambda: collected.append(True))
    with open_checkpoint(tiny) as checkpoint:
        load_engine(checkpoint, LoadOptions())
    assert not collected
