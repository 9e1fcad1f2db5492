"""The CPU device: the checkpoints that it supports, and the memory that its steps access."""

import ctypes
import logging
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.backends import device_choice
from engine.backends.cpu.device import CpuDevice, CpuStep
from engine.checkpoints.checkpoint import Checkpoint
from engine.config import EngineConfig
from engine.cpu_threads import MAX_POOL_THREADS
from engine.errors import UnsupportedModel
from engine.kv.cache import LayerBlock
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.mixer_config import CacheConfig
from engine.model_config import ModelConfig
from quant.cpu import tiers
from quant.cpu.arena import Overrun
from quant.cpu.tiers import choose
from quant.errors import UnsupportedTier
from tests.engine.answers import answer
from tests.engine.backends.cpu.recorded import advance, compute, load_step, poison, sequence, spoil
from tests.engine.models.tiny_llama import MIXES, make
from tests.kernels.shapes import LLAMA_8B, QWEN_30B_A3B, SMALL_135M
from tests.support.held_request import HeldRequest

SEED = 10
VOCABULARY = 300
CONFIG = EngineConfig("cpu", context_length=160, num_blocks=200, max_step_tokens=61, max_running=16, threads=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with every type of weight."""
    folder = tmp_path_factory.mktemp("tiny")
    return make(folder, heads=6, kv_heads=2, head_dim=32, hidden=96, vocab=VOCABULARY, types=MIXES["every type"]).path


@pytest.fixture(params=[torch.float16, torch.int8])
def step(request: pytest.FixtureRequest, path: Path, cpu_kernels: Path) -> CpuStep:
    made = load_step(path, cpu_kernels, CONFIG, kv_type=request.param)
    spoil(made._kv.pools[0])
    return made


def requests(lengths: Sequence[int]) -> list[HeldRequest]:
    rng, block, made = random.Random(SEED), 1, []
    for number, length in enumerate(lengths):
        blocks = range(block, block := block + -(-length // 16))
        made.append(sequence(number, [rng.randrange(VOCABULARY) for _ in range(length)], blocks))
    return made


def run(step: CpuStep, parts: Sequence[tuple[HeldRequest, int]], threads: int | None = None) -> torch.Tensor:
    return compute(step, advance(parts, vocab_size=VOCABULARY, num_blocks=CONFIG.num_blocks), threads)


def test_largest_and_odd_batches_stay_within_their_buffers(step: CpuStep) -> None:
    """The batches reach the limits of tokens, requests, context, and outputs. `compute` checks all guards."""
    together = requests([160] * 16)
    while any(it.num_computed < 160 for it in together):
        counts = [min(160 - it.num_computed, 1 + (index + it.num_computed) % 7) for index, it in enumerate(together)]
        counts[0] = min(160 - together[0].num_computed, counts[0] + CONFIG.max_step_tokens - sum(counts))
        parts = [(it, count) for it, count in zip(together, counts, strict=True) if count]
        assert sum(count for _, count in parts) <= CONFIG.max_step_tokens
        assert run(step, parts).isfinite().all()
    (alone,) = requests([160])
    for count in (61, 61, 37, 1):
        assert run(step, [(alone, count)]).isfinite().all()


def test_stale_buffers_do_not_affect_results(step: CpuStep) -> None:
    (first,), (second,) = requests([50]), requests([50])
    for count in (33, 1, 1, 15):
        batches = [
            advance([(it, count)], vocab_size=VOCABULARY, num_blocks=CONFIG.num_blocks) for it in (first, second)
        ]
        clean = step(batches[0]).values.clone()
        poison(step)
        assert step._values.isnan().all()
        assert torch.equal(step(batches[1]).values, clean)


@pytest.mark.parametrize("name", ["scratch", "header", "largest logits", "weight", "tiles"])
def test_guard_check_names_an_overrun_region(step: CpuStep, name: str) -> None:
    (it,) = requests([20])
    run(step, [(it, 10)])
    region = next(region for region, _ in step.arena._regions if region.name == name)
    ctypes.c_uint8.from_address(region.address + region.size).value = 0
    with pytest.raises(Overrun, match=f"past the {region.size} bytes of {name}"):
        run(step, [(it, 10)])


@pytest.mark.share(1)
@pytest.mark.parametrize("after", ["float16", "int8"])
@pytest.mark.parametrize("before", ["float16", "int8"])
def test_step_accesses_only_its_buffers(path: Path, cpu_kernels: Path, before: str, after: str) -> None:
    """Runs a process in which every buffer, weight, and cache is next to a guard page."""
    command = [
        sys.executable,
        "-m",
        "tests.engine.backends.cpu.fenced_run",
        str(path),
        str(cpu_kernels),
        before,
        after,
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[4])
    assert done.returncode == 0, f"ended by {done.returncode}: {done.stdout}{done.stderr}"
    assert done.stdout == "before: no access outside of buffers\nafter: no access outside of buffers\n"


# -- supported checkpoints


def test_auto_selects_the_cpu_kernels(path: Path, cpu_kernels: Path) -> None:
    options = LoadOptions(code_cache=cpu_kernels, context_length=128)
    backend, said = answer(path, options)
    assert backend == "cpu"
    assert (backend, said) == answer(path, replace(options, backend="cpu", threads=1))
    assert len(said) == 8


@pytest.mark.parametrize("kv_type", ["auto", "f16", "int8"])
def test_kv_type_option_sets_the_cache_type(path: Path, cpu_kernels: Path, kv_type: str) -> None:
    options = LoadOptions(code_cache=cpu_kernels, context_length=128, kv_type=kv_type)
    with open_checkpoint(path) as checkpoint:
        salt = load_engine(checkpoint, options).config.cache_salt
    assert ("torch.int8" if kv_type == "int8" else "torch.float16") in salt
    assert answer(path, options) == answer(path, replace(options, threads=1))


UNSUPPORTED = {
    "head dimension is 16": {"head_dim": 16},
    "head dimension is 40": {"head_dim": 40},
    "attention's width is 48": {"heads": 1, "head_dim": 48, "hidden": 32},
    "hidden size is 48": {"hidden": 48, "head_dim": 32},
}


@pytest.mark.parametrize("problem", UNSUPPORTED)
def test_unsupported_shape_falls_back_or_is_refused(
    tmp_path: Path, cpu_kernels: Path, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    shape = {"heads": 2, "kv_heads": 1, **UNSUPPORTED[problem]}
    tiny = make(tmp_path, **shape).path  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        assert answer(tiny, LoadOptions(code_cache=cpu_kernels))[0] == "reference"
    assert "reference kernels" in caplog.text
    with open_checkpoint(tiny) as checkpoint, pytest.raises(UnsupportedModel, match=problem):
        load_engine(checkpoint, LoadOptions(backend="cpu", code_cache=cpu_kernels))


@pytest.mark.parametrize(
    ("model", "threads", "tokens"),
    [(SMALL_135M, 2, 256), (LLAMA_8B, 2, 32), (LLAMA_8B, 16, 64), (QWEN_30B_A3B, 2, 64)],
)
def test_steps_are_short_but_use_each_expert_for_several_tokens(model: ModelConfig, threads: int, tokens: int) -> None:
    assert CpuDevice(threads, 14, choose("auto"), None).step_tokens(model) == tokens


def are_compiled(checkpoint: Checkpoint, options: LoadOptions) -> bool:
    return device_choice.layouts_are_compiled(device_choice.layouts_to_compile(checkpoint, options), options)


def test_reference_kernels_are_used_without_a_compiler(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "_has_compiler", lambda: False)
    assert answer(path, LoadOptions())[0] == "reference"
    with open_checkpoint(path) as checkpoint:
        assert are_compiled(checkpoint, LoadOptions())
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsupportedModel, match="numba"):
        load_engine(checkpoint, LoadOptions(backend="cpu"))


def test_unsupported_cpu_tier_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "host_features", lambda: frozenset({"sse2"}))
    options = LoadOptions(cpu_tier="avx2", context_length=128)
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsupportedTier, match="avx2"):
        load_engine(checkpoint, options)
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsupportedTier):
        device_choice.compile_layouts(device_choice.layouts_to_compile(checkpoint, options), options)


def test_layouts_are_compiled_only_in_their_cache_folder(path: Path, cpu_kernels: Path, tmp_path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        assert are_compiled(checkpoint, LoadOptions(code_cache=cpu_kernels))
        assert not are_compiled(checkpoint, LoadOptions(code_cache=tmp_path))
        assert not are_compiled(checkpoint, LoadOptions())
        assert are_compiled(checkpoint, LoadOptions(backend="reference"))


def test_numerics_include_everything_that_changes_bits() -> None:
    target = choose("auto")
    one, two = (CpuDevice(threads, bits, target, None) for threads, bits in ((1, 8), (4, 14)))
    assert one.numerics != two.numerics
    assert two.numerics == CpuDevice(1, 14, target, None).numerics
    assert two.numerics != CpuDevice(4, 14, replace(target, tier="another"), None).numerics
    assert CpuDevice(1000, 14, target, None).threads == MAX_POOL_THREADS
    cache, integers = CacheConfig(3, 64), CpuDevice(1, 14, target, None, torch.int8)
    assert two.layer_block(cache) == LayerBlock((3, 2 * 16 * 64), torch.float16)
    assert integers.layer_block(cache) == LayerBlock((3, 2 * 16 * (64 + 4)), torch.int8)
    with pytest.raises(UnsupportedModel, match="head dimension of 72"):
        two.layer_block(CacheConfig(1, 72))
