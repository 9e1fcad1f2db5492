"""GPU memory for the KV cache: the free memory less a reserve, or the user's limit."""

from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from engine.backends.cuda.device import CudaDevice, CudaOptions, why_unsupported
from engine.backends.cuda.gpu import Gpu, planned_gpu
from engine.backends.cuda.memory import MARGIN_BYTES, MAX_HOST, MAX_RESERVE, GpuMemory, loading_bytes, step_bytes
from engine.config import ALL_FREE, BLOCK_SIZE, MemoryLimit
from engine.errors import OutOfMemory
from engine.kv.budget import USEFUL_CONTEXT, HostMemory
from engine.load_options import LoadOptions
from engine.loading import _resolve, cache_budget
from engine.model_config import ModelConfig, NormRule, RopeConfig
from quant.cuda.loading import SLAB_BYTES
from quant.kernels.card import Card
from tests.kernels.shapes import QWEN_30B_A3B, layer

GIB = 1 << 30
CARD = Card("a card", (8, 9), 128, 99 << 10, 72 << 20, 24 * GIB)
MODEL = ModelConfig(
    "llama", (layer(32, 8, 128, 14336),) * 32, 4096, 128256, 131072, NormRule(1e-5), (RopeConfig(5e5, 128, False),)
)


@dataclass
class FakeGpu:
    """A GPU with a given amount of free memory."""

    free: int
    own: int = 0
    dropped: int = 0  # number of times that caches were dropped
    card: Card = field(default=CARD)

    def free_memory(self) -> int:
        return self.free

    def own_memory(self) -> int:
        return self.own

    def drop_caches(self) -> None:
        self.dropped += 1


def memory(limit: MemoryLimit = ALL_FREE, free: int = 24 * GIB, own: int = 0, card: Card = CARD) -> GpuMemory:
    return GpuMemory(cast(Gpu, FakeGpu(free, own, card=card)), limit)


def test_kv_cache_excludes_reserve_and_memory_of_other_programs() -> None:
    assert memory().kv_bytes_after_loading(5 * GIB) == 24 * GIB - MAX_RESERVE - 5 * GIB - MARGIN_BYTES
    assert memory(free=20 * GIB).kv_bytes_after_loading(0) == memory().kv_bytes_after_loading(0) - 4 * GIB
    small = replace(CARD, memory_bytes=8 * GIB)
    assert 8 * GIB - memory(free=8 * GIB, card=small).kv_bytes_after_loading(0) - MARGIN_BYTES == int(0.06 * 8 * GIB)


def test_limit_includes_memory_of_this_engine_only_and_respects_free_memory() -> None:
    """Another engine of the process holds 4 GiB when this one starts to load, and this one then allocates 3."""
    for limit in (MemoryLimit(num_bytes=10 * GIB), MemoryLimit(share=10 / 24)):
        gpu = FakeGpu(20 * GIB, own=4 * GIB)
        engine = GpuMemory(cast(Gpu, gpu), limit)
        assert engine.allowed() == 10 * GIB
        engine.start_loading()
        assert engine.allowed() == 10 * GIB
        gpu.own += 3 * GIB
        assert engine.kv_bytes_after_loading(GIB) == 6 * GIB - MARGIN_BYTES
    assert memory(MemoryLimit(share=1.0), free=3 * GIB).kv_bytes_after_loading(0) == 3 * GIB - MARGIN_BYTES


def test_host_pools_take_a_quarter_of_the_free_memory_or_what_is_allotted() -> None:
    def pool(host: HostMemory, weights: int = 0) -> int:
        return GpuMemory(cast(Gpu, FakeGpu(GIB)), ALL_FREE, host).host_pool(weights)

    assert pool(HostMemory(free=8 * GIB)) == 2 * GIB
    assert pool(HostMemory(free=8 * GIB, pools=GIB)) == GIB
    assert pool(HostMemory(allotted=3 * GIB), weights=GIB) == 2 * GIB
    assert pool(HostMemory(allotted=3 * GIB, pools=GIB), weights=GIB) == GIB
    assert pool(HostMemory(allotted=90 * GIB)) == MAX_HOST


def test_caches_are_dropped_before_free_memory_is_read() -> None:
    """The driver does not count cached memory, and a part of it may be too fragmented, or reserved for graphs."""
    gpu = FakeGpu(24 * GIB)
    assert GpuMemory(cast(Gpu, gpu), ALL_FREE).allowed() == 24 * GIB - MAX_RESERVE
    assert gpu.dropped == 1


@pytest.mark.parametrize("limit", [ALL_FREE, MemoryLimit(num_bytes=10 * GIB)])
def test_memory_of_a_draft_model_is_left_free(limit: MemoryLimit) -> None:
    gpu = cast(Gpu, FakeGpu(24 * GIB))
    assert GpuMemory(gpu, limit, reserved=GIB).allowed() == GpuMemory(gpu, limit).allowed() - GIB


@pytest.mark.parametrize(
    ("limit", "asked", "context", "tokens"),
    [
        (ALL_FREE, 0, 69_000, 69_000),  # half of the memory that the model leaves free
        (ALL_FREE, 100_000, 100_000, 100_000),
        (MemoryLimit(share=0.9), 0, 127_000, 127_000),
        (MemoryLimit(num_bytes=9 * GIB), 0, 25_000, 25_000),
    ],
)
def test_kv_cache_leaves_memory_to_other_programs_by_default(
    limit: MemoryLimit, asked: int, context: int, tokens: int
) -> None:
    device = CudaDevice(planned_gpu(24 * GIB), CudaOptions(memory=limit))
    config = _resolve(MODEL, device, LoadOptions(context_length=asked), (), 5 * GIB)
    assert config.context_length == pytest.approx(context, rel=0.03)
    assert BLOCK_SIZE * config.num_blocks == pytest.approx(tokens, rel=0.03)
    assert config.longest_context >= config.context_length


def test_useful_context_may_take_all_memory() -> None:
    device = CudaDevice(planned_gpu(12 * GIB), CudaOptions())
    room = device.kv_memory(MODEL, 5 * GIB)
    budget = cache_budget(MODEL, device)
    assert budget.bytes(USEFUL_CONTEXT) < room < 2 * budget.bytes(USEFUL_CONTEXT)
    assert _resolve(MODEL, device, LoadOptions(), (), 5 * GIB).context_length == USEFUL_CONTEXT


def test_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    assert 0 < memory().kv_bytes_before_loading(MODEL, 8 * GIB, 2048, 128) < 24 * GIB - MAX_RESERVE - 8 * GIB
    with pytest.raises(OutOfMemory, match=r"needs 3\d\.\d GB .* 24\.7 GB are") as refusal:
        memory().kv_bytes_before_loading(MODEL, 32 * GIB, 2048, 128)
    assert "--context" in str(refusal.value.remedy)


def test_needs_include_temporary_memory_of_loading() -> None:
    loading = loading_bytes(MODEL, 16 * GIB)
    assert loading > 4 * SLAB_BYTES + 4 * 2 * 2 * 4096 * 14336
    assert memory().needs(MODEL, 16 * GIB, 1, 1).steps == loading
    assert memory().needs(MODEL, 16 * GIB, 4096, 128).steps > loading


def test_experts_count_once_when_they_are_loaded_and_as_often_as_they_are_active_in_a_step() -> None:
    matrix = QWEN_30B_A3B.hidden * 2 * 768
    weights = QWEN_30B_A3B.matrix_elements  # bytes, with one byte for each
    qkv = 5120 * QWEN_30B_A3B.hidden
    assert matrix < qkv
    assert loading_bytes(QWEN_30B_A3B, weights) == 4 * (SLAB_BYTES + qkv)
    per_token = step_bytes(QWEN_30B_A3B, 2, 1) - step_bytes(QWEN_30B_A3B, 1, 1)
    assert per_token == 8 * 2048 + 4 * 8 * 2048 + 6 * 2 * 8 * 768
    device = CudaDevice(planned_gpu(80 * GIB), CudaOptions())
    assert device.step_tokens(QWEN_30B_A3B) == 2048
    assert 9 * QWEN_30B_A3B.active_elements < QWEN_30B_A3B.matrix_elements


def test_width_of_experts_must_suit_the_kernels() -> None:
    layer = QWEN_30B_A3B.layers[0]
    assert why_unsupported(QWEN_30B_A3B) is None
    odd = replace(QWEN_30B_A3B, layers=(replace(layer, mlp=replace(layer.mlp, hidden=760)),) * 48)
    assert why_unsupported(odd) == "its MLP is 760, not a multiple of 16"


def test_step_estimate_grows_with_tokens_and_rows() -> None:
    assert step_bytes(MODEL, 2048, 128) > step_bytes(MODEL, 256, 128) > step_bytes(MODEL, 256, 1) > 0
