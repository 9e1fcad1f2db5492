"""The first layers of SmolLM2 with a disk cache: replies are equal when computed, cached, and restored."""

import random
from pathlib import Path

import pytest
import torch

from engine.load_options import DiskOptions, LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.support.random_gguf import SIZES, write

MODEL = "a5" * 32
REPLY = 20  # tokens


def load(path: Path, code_cache: Path, folder: Path | None, **options: object) -> ModelEngine:
    disk = DiskOptions(folder, 1 << 30) if folder else None
    options = {"backend": "cpu", "code_cache": code_cache, "fingerprint": MODEL, "context_length": 2048, **options}
    with open_checkpoint(path) as checkpoint:
        return load_engine(checkpoint, LoadOptions(disk=disk, **options))  # type: ignore[arg-type]


def say(engine: ModelEngine, prompt: tuple[int, ...], **params: object) -> Request:
    wanted = SamplingParams(**{"temperature": 0, "max_tokens": REPLY, "ignore_eos": True, **params})  # type: ignore[arg-type]
    request = engine.request(prompt, wanted, frozenset())
    engine.add(request)
    while engine.has_requests:
        engine.step()
    engine.flush()
    engine.assert_empty()
    return request


def poison(engine: ModelEngine) -> None:
    """Fill every unused and empty block with NaN, or -1 for integers."""
    for pool, group in zip(
        engine._runner._model.kv.pools,  # type: ignore[attr-defined]
        engine._scheduler._memory.groups,
        strict=True,
    ):
        pool[list(group.pool._empty)] = torch.nan if pool.dtype.is_floating_point else -1


@pytest.mark.share(1)
@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_cold_cached_and_restored_replies_are_equal(
    short_smollm2: Path, cpu_kernels: Path, tmp_path: Path, kv_type: str
) -> None:
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(10, 40_000) for _ in range(length)) for length in (37, 400)]
    first = load(short_smollm2, cpu_kernels, tmp_path, kv_type=kv_type)
    cold = [say(first, prompt) for prompt in prompts]
    longer = [(*request.prompt_ids, *request.output_ids, *range(500, 530)) for request in cold]
    warm = [say(first, prompt) for prompt in longer]
    again = load(short_smollm2, cpu_kernels, tmp_path, kv_type=kv_type)
    poison(again)
    restored = [say(again, prompt) for prompt in longer]
    plain = load(short_smollm2, cpu_kernels, None, kv_type=kv_type)
    computed = [say(plain, prompt) for prompt in longer]
    for found, one, other, none in zip(restored, warm, computed, cold, strict=True):
        assert found.output_ids == one.output_ids == other.output_ids
        assert found.cache.disk == (len(found.prompt_ids) - 1) // 16 * 16
        assert one.cache.device == (len(none.prompt_ids) + REPLY - 1) // 16 * 16
        assert other.cache.cached == 0
    counters = again.state().counters
    assert counters.disk_misses == 0
    assert counters.computed_tokens == sum(len(it.prompt_ids) - it.cache.disk + REPLY - 1 for it in restored)


def test_disk_cache_of_another_model_or_type_is_not_used(cpu_kernels: Path, tmp_path: Path) -> None:
    """The model, the KV type, or the activation precision differs, or the fingerprint is missing."""
    write(tiny := tmp_path / "tiny.gguf", "Q4_1", SIZES["tiny"])
    prompt = tuple(range(100, 400))
    say(load(tiny, cpu_kernels, tmp_path), prompt)
    assert say(load(tiny, cpu_kernels, tmp_path), prompt).cache.disk == 288
    assert say(load(tiny, cpu_kernels, tmp_path, fingerprint="b6" * 32), prompt).cache.cached == 0
    assert say(load(tiny, cpu_kernels, tmp_path, kv_type="int8"), prompt).cache.cached == 0
    assert say(load(tiny, cpu_kernels, tmp_path, activation_bits=8), prompt).cache.cached == 0
    assert say(load(tiny, cpu_kernels, tmp_path, fingerprint=""), prompt).cache.cached == 0
