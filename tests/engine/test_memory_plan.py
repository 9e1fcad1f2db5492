"""The memory that a load promises to take, compared with what it takes on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.backends.cuda.gpu import planned_gpu
from engine.config import MemoryLimit
from engine.errors import OutOfMemory, UnsupportedModel
from engine.kv import budget
from engine.kv.budget import ANY_MEMORY, HostMemory
from engine.load_options import LoadOptions
from engine.system_memory import resident_bytes
from tests.engine.measured_load import POOL, load, options_of, plan_of
from tests.engine.models import family_checkpoints, tiny_bert
from tests.engine.models.tiny_llama import make
from tests.support.random_gguf import Shape, write

NOISE = 4 << 20  # bytes that Python and the C library take meanwhile
MIB = 1 << 20
SHAPE = Shape(4, 256, 4, 4, 64, 512, 100_000, context=32_768)  # large tables and long contexts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write(path, "Q6_K", SHAPE)
    return path


@pytest.mark.skipif(resident_bytes() is None, reason="the system does not report the memory")
def test_load_takes_at_most_the_allotted_memory(model: Path, cpu_kernels: Path) -> None:
    command = [sys.executable, "-m", "tests.engine.measured_load", str(model), str(cpu_kernels), "0", "0.5", "1"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    measured = [tuple(map(int, line.split())) for line in lines]
    assert all(0.6 * allotted < peak <= allotted + NOISE for allotted, peak, _ in measured), measured
    assert [context == SHAPE.context for _, _, context in measured] == [False, False, True]


def test_least_memory_suffices_and_less_does_not(model: Path, cpu_kernels: Path) -> None:
    for context in (0, 3000):
        options = options_of(cpu_kernels, context)
        plan = plan_of(model, options)
        load(model, plan.allotted(options, plan.least))
        with pytest.raises((OutOfMemory, UnsupportedModel)):
            load(model, plan.allotted(options, plan.least - MIB))


def test_plan_does_not_depend_on_the_free_memory(
    model: Path, cpu_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(model, options_of(cpu_kernels))
    monkeypatch.setattr(budget, "available_memory", lambda: 1 << 10)
    assert plan_of(model, options_of(cpu_kernels)) == plan
    assert (plan.gpu, plan.host_weights, plan.host_pool) == (None, 0, POOL)


def test_weights_in_the_hosts_memory_are_listed_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.fit.gpu_for", lambda options: planned_gpu(8 << 30))
    path = family_checkpoints.make(tmp_path, "gemma4 embeddings per layer", "folder").path
    options = LoadOptions(host_cache=POOL, context_length=64)
    plan = plan_of(path, options)
    assert plan.gpu == 0
    assert plan.host_weights > 0
    assert plan.host_pool == POOL
    assert plan.least == plan.weights + plan.steps + plan.kv_least
    assert plan.most - plan.least > 50 * plan.kv_least  # for 128 requests
    limited = plan.allotted(options, 7 * MIB, host=9 * MIB)
    assert (limited.device, limited.gpu_memory, limited.host_memory) == ("cuda:0", MemoryLimit(7 * MIB), 9 * MIB)


def test_embedding_model_promises_its_weights(tmp_path: Path) -> None:
    plan = plan_of(tiny_bert.make(tmp_path).folder, LoadOptions(device="cpu"))
    assert plan.least == plan.most == plan.weights > 0


def test_model_of_the_reference_kernels_is_planned(tmp_path: Path) -> None:
    path = make(tmp_path).path
    plan = plan_of(path, LoadOptions(device="cpu"))
    config = load(path, plan.allotted(LoadOptions(), plan.most)).config
    assert config.context_length == config.model_context_length


def test_allotted_memory_is_used_whole_and_free_memory_by_half() -> None:
    assert HostMemory(allotted=100).kv_bytes(40, 10) == 50
    assert HostMemory(free=100).kv_bytes(10, 10) == 50
    assert HostMemory(free=100).kv_bytes(60, 10) == 30
    assert HostMemory(allotted=100, pools=20).kv_bytes(40, 10) == 30
    assert HostMemory(allotted=100, loading=60).kv_bytes(40, 10) == 50
    with pytest.raises(OutOfMemory, match="needs"):
        HostMemory(allotted=100, loading=61).kv_bytes(40, 10)


def test_memory_of_a_draft_model_is_left_free() -> None:
    assert HostMemory(allotted=100, reserved=20).kv_bytes(40, 10) == 30
    assert HostMemory(free=100, reserved=20).kv_bytes(10, 10) == 40


def test_host_pools_shrink_to_the_allotted_memory() -> None:
    assert ANY_MEMORY.pool_bytes(50, 10) == 50
    assert HostMemory(pools=70).pool_bytes(50, 10) == 70
    assert HostMemory(allotted=60, pools=70).pool_bytes(50, 10) == 50
    with pytest.raises(OutOfMemory, match="keeps"):
        HostMemory(allotted=9).pool_bytes(0, 10)
