"""Compare captured steps that verify drafts with the same steps launched kernel by kernel: logits and times."""

from collections.abc import Iterator
from dataclasses import replace

from engine.backends.cuda.runner import CudaRunner
from engine.backends.cuda.step import CudaStep
from engine.batch import Batch
from engine.config import BLOCK_SIZE
from engine.loading import load_engine
from tests.gpu.engine import INT4, options_of, random_checkpoint
from tests.gpu.figures import Figure
from tests.gpu.machine import Machine
from tests.kernels.shapes import LLAMA_8B, TINY

LAYERS = 8  # of 32, so that loading takes less time
TOKENS = (1, 2, 3, 4, 8)  # of one request; 3 are padded to 4
CLOSE = 2e-2  # relative to the standard deviation of the logits; with `deterministic`, all bits are equal


def figures(machine: Machine) -> Iterator[Figure]:
    """Yield the largest difference between logits with and without a graph, and the time of each step."""
    model = TINY if machine.dry else replace(LLAMA_8B, layers=LLAMA_8B.layers[:LAYERS])
    for deterministic in (True, False):
        engine = load_engine(
            random_checkpoint(machine, model, INT4[0]), options_of(machine, deterministic=deterministic)
        )
        runner = engine._runner
        if not isinstance(runner, CudaRunner):
            raise TypeError("the model was loaded by another backend")
        name = "steps that verify drafts" + ", deterministic" * deterministic
        most = 0.0 if deterministic else CLOSE
        yield Figure(f"{name}: error", max(_error(runner._step, count) for count in TOKENS), "", most=most)
        yield Figure(f"{name}: failed captures", float(engine.state().failed_captures), "", most=0.0)
        for count in () if deterministic else TOKENS:
            yield from _times(machine, runner._step, count)
        engine.close()


def _error(step: CudaStep, count: int) -> float:
    wanted = step.launch(_batch(count), kept=True).values
    found = step.launch(_batch(count)).values
    return float((found - wanted).abs().max() / wanted.std())


def _times(machine: Machine, step: CudaStep, count: int) -> Iterator[Figure]:
    def seconds(*, kept: bool) -> float:
        def run() -> None:
            step.launch(_batch(count), kept=kept)
            step.gpu.synchronize()

        return machine.seconds_on_host(run)

    captured, launched = seconds(kept=False), seconds(kept=True)
    yield Figure(f"{LAYERS} layers, {count} tokens of a request: captured", 1e3 * captured, "ms")
    yield Figure(
        f"{LAYERS} layers, {count} tokens of a request: launched", 1e3 * launched, "ms", launched / captured, "captured"
    )


def _batch(count: int) -> Batch:
    """Return a batch of the first tokens of a request in block 1, which is free while no request runs."""
    tokens = range(count)
    slots = [BLOCK_SIZE + token for token in tokens]
    return Batch([5 + token for token in tokens], tokens, (slots,), ([[1]],), [0, count], [count], tokens)
