"""Compare decode steps whose kernels start early with the same steps in order: logits and times."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine.backends.cuda.runner import CudaRunner
from engine.backends.cuda.step import CudaStep
from engine.batch import Batch
from engine.config import BLOCK_SIZE
from engine.loading import ModelEngine, load_engine
from quant.kernels.card import Card
from tests.gpu.engine import INT4, options_of, random_checkpoint
from tests.gpu.figures import Figure
from tests.gpu.machine import Machine
from tests.kernels.shapes import LLAMA_8B, TINY

LAYERS = 8  # of 32, so that loading takes less time
STEPS = 200  # each with another token, so that a kernel that reads too soon sees those of another step


def figures(machine: Machine) -> Iterator[Figure]:
    """Yield the number of steps with other logits, and the time of a step with and without an early start."""
    in_order = replace(machine.card, early_start_fails=True)
    engines = [_engine(machine, card) for card in (machine.card, in_order)]
    early, ordered = (_step(engine) for engine in engines)
    different = sum(
        not torch.equal(_logits(early, token), _logits(ordered, token)) for token in range(machine.scaled(STEPS, 2))
    )
    yield Figure("early start: steps with other logits", float(different), "", most=0.0)
    seconds = [machine.seconds_on_host(partial(_run, step)) for step in (early, ordered)]
    yield Figure(f"{LAYERS} layers, one token: in order", 1e3 * seconds[1], "ms")
    yield Figure(f"{LAYERS} layers, one token: early", 1e3 * seconds[0], "ms", seconds[0] / seconds[1], "in order")
    for engine in engines:
        engine.close()


def _engine(machine: Machine, card: Card) -> ModelEngine:
    model = TINY if machine.dry else replace(LLAMA_8B, layers=LLAMA_8B.layers[:LAYERS])
    return load_engine(random_checkpoint(machine, model, INT4[0]), replace(options_of(machine), card=card))


def _step(engine: ModelEngine) -> CudaStep:
    if not isinstance(engine._runner, CudaRunner):
        raise TypeError("the model was loaded by another backend")
    return engine._runner._step


def _logits(step: CudaStep, token: int) -> Tensor:
    # The first position of a request in block 1, which is free while no request runs.
    return step.launch(Batch([5 + token], [0], ([BLOCK_SIZE],), ([[1]],), [0, 1], [1], [0])).values.clone()


def _run(step: CudaStep) -> None:
    _logits(step, 0)
    step.gpu.synchronize()
