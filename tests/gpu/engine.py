"""Measure the whole engine on a model with random weights: one and several streams, prompts, and deterministic mode."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from app.bench.own_engine import OwnEngine
from app.bench.sample import Sample
from app.bench.workload import Load, Rate
from engine.load_options import LoadOptions
from engine.loading import load_engine
from engine.model_config import ModelConfig
from tests.gpu.figures import Figure, fraction
from tests.gpu.machine import Machine
from tests.gpu.random_checkpoint import RandomCheckpoint
from tests.kernels.shapes import LLAMA_8B, QWEN_30B_A3B, TINY, TINY_EXPERTS
from tests.support.weight_mixes import Q4_K_M

DRY_MIXES = {Q4_K_M: "BF16"}  # the cheapest weights for the interpreter
CONTEXT = 4096 + 512
BATCHES = (8, 32, 128)
COLD_SECONDS = 60.0  # limit for the first token with an empty kernel cache
EXPERT_LAYERS = 16  # of 48, so that loading takes less time
# limits of the rate of one stream, as a fraction of the rate at which all weights in use are read
LEAST_OF_FLOOR = {"INT4": 0.65, "INT4 experts": 0.55}
LEAST_OF_PEAK = 0.35  # of a prompt of 4096 tokens
INT4, FP8, BF16 = (Q4_K_M, "INT4"), ("e4m3 channel", "FP8"), ("BF16", "BF16")


def int4(machine: Machine) -> Iterator[Figure]:
    yield from _figures(machine, *INT4)


def experts(machine: Machine) -> Iterator[Figure]:
    """Measure some layers of Qwen3 30B A3B."""
    model = TINY_EXPERTS if machine.dry else replace(QWEN_30B_A3B, layers=QWEN_30B_A3B.layers[:EXPERT_LAYERS])
    yield from _figures(machine, Q4_K_M, "INT4 experts", model)


def cold(machine: Machine) -> Iterator[Figure]:
    """Measure INT4 weights, starting with an empty cache of compiled kernels."""
    yield from _figures(machine, *INT4, cold=True)


def fp8(machine: Machine) -> Iterator[Figure]:
    yield from _figures(machine, *FP8)


def bf16(machine: Machine) -> Iterator[Figure]:
    yield from _figures(machine, *BF16)


def deterministic(machine: Machine) -> Iterator[Figure]:
    """Measure the rates of the deterministic mode relative to the default mode."""
    model, loads = _model(machine), _loads(machine)
    rates: dict[bool, dict[Load, float]] = {}
    for mode in (False, True):
        with _running(machine, random_checkpoint(machine, model, INT4[0]), deterministic=mode) as runs:
            rates[mode] = {load: runs.rate(load, rate) for load, rate in loads.items()}
    for load, rate in loads.items():
        value = rates[True][load]
        yield Figure(
            f"--deterministic, {_title(load, rate)}", value, "tok/s", value / rates[False][load], "the other mode"
        )


def _figures(
    machine: Machine, mix: str, name: str, model: ModelConfig | None = None, *, cold: bool = False
) -> Iterator[Figure]:
    start = time.perf_counter()
    model = model or _model(machine)
    checkpoint = random_checkpoint(machine, model, mix)
    with _running(machine, checkpoint) as runs:
        loaded = time.perf_counter() - start
        runs.sample(Load(machine.scaled(16, 1), 1))
        if cold:
            first = time.perf_counter() - start
            yield Figure(f"{name}: cold kernel cache to first token", first, "s", most=COLD_SECONDS)
            yield Figure(f"{name}: of that, to the end of loading", loaded, "s")
        for load, rate in _loads(machine).items():
            sample = runs.measured(load)
            if rate is Rate.PREFILL:
                yield _prompt(machine, name, load, sample.rates[rate], model)
            else:
                # seconds of a step that only reads all weights in use once
                floor = fraction(float(checkpoint.bytes_per_step(load.streams)), machine.peaks.copy)
                yield _decode(name, load, sample.rates[rate], floor)
            if load.streams == 1 and rate is Rate.PREFILL:
                waited = 1e3 * sample.first_token[0]
                yield Figure(f"{name}: first token of {load.prompt_tokens} tokens", waited, "ms")


def _prompt(machine: Machine, name: str, load: Load, value: float, model: ModelConfig) -> Figure:
    """Compare a prompt with the peak of the matrix units. The operations are those of the layers' matrices."""
    operations = 2 * (model.active_elements - 2 * model.vocab_size * model.hidden)
    least = LEAST_OF_PEAK if model.active_experts and load.prompt_tokens == 4096 else None
    part = fraction(value * operations, machine.peaks.bfloat16)
    return Figure(f"{name}: {_title(load, Rate.PREFILL)}", value, "tok/s", part, "bf16 peak", least if part else None)


def _decode(name: str, load: Load, value: float, floor: float | None) -> Figure:
    """Compare decode with a step that only reads all weights once."""
    title = f"{name}: {_title(load, Rate.DECODE)}"
    if floor is None:
        return Figure(title, value, "tok/s")
    steps = floor * value / load.streams  # ratio of the floor to the real step time
    if load.streams == 32:
        return Figure(f"{title}, steps of", 1e3 * load.streams / value, "ms", 1 / steps, "floor (times)", most=2.5)
    least = LEAST_OF_FLOOR.get(name) if load.streams == 1 else None
    return Figure(title, value, "tok/s", steps, "floor", least)


def _title(load: Load, rate: Rate) -> str:
    if rate is Rate.PREFILL:
        return f"prompt of {load.prompt_tokens}"
    return f"decode, batch {load.streams}"


def _model(machine: Machine) -> ModelConfig:
    return TINY if machine.dry else LLAMA_8B


def random_checkpoint(
    machine: Machine, model: ModelConfig, mix: str, device: torch.device | None = None
) -> RandomCheckpoint:
    kind = DRY_MIXES.get(mix, mix) if machine.dry else mix
    return RandomCheckpoint(model, kind, device or machine.device)


def _loads(machine: Machine) -> dict[Load, Rate]:
    if machine.dry:
        return {Load(5, 2): Rate.DECODE}
    single = {Load(128, 96): Rate.DECODE, Load(512, 1): Rate.PREFILL, Load(4096, 1): Rate.PREFILL}
    return single | {Load(64, 48, streams): Rate.DECODE for streams in BATCHES}


@dataclass
class _Runs:
    """An engine to measure. No two prompts are equal, so no prefix is cached."""

    engine: OwnEngine
    vocab_size: int
    repeat: int
    turn: int = 0

    def sample(self, load: Load) -> Sample:
        self.turn += 1
        return self.engine.measure(load, load.prompts(self.turn, self.vocab_size))

    def measured(self, load: Load) -> Sample:
        """Return the fastest run. The first run, which compiles kernels, only counts if there is no other."""
        samples = [self.sample(load) for _ in range(1 + self.repeat)]
        return max(samples[1:] or samples, key=lambda it: it.rates[Rate.END_TO_END])

    def rate(self, load: Load, rate: Rate) -> float:
        return self.measured(load).rates[rate]


@contextmanager
def _running(machine: Machine, checkpoint: RandomCheckpoint, *, deterministic: bool = False) -> Iterator[_Runs]:
    engine = load_engine(checkpoint, options_of(machine, deterministic=deterministic))
    runs = _Runs(OwnEngine(engine), engine.vocab_size, machine.scaled(2, 0))
    del engine
    try:
        yield runs
    finally:  # free the memory before the next engine is loaded
        del runs.engine
        gc.collect()
        torch.cuda.empty_cache()


def options_of(machine: Machine, *, deterministic: bool = False) -> LoadOptions:
    card = machine.card if machine.dry else None
    context = 64 if machine.dry else CONTEXT
    return LoadOptions(backend="cuda", context_length=context, card=card, deterministic=deterministic, host_cache=0)
