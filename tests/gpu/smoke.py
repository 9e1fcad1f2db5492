"""Check in a few seconds that the machine can run the benchmark: versions, the driver, a kernel, and a capture."""

import platform
from collections.abc import Iterator

import torch
import triton

from engine.backends.cuda.gpu import Gpu
from engine.kernels.activations import gated
from engine.model_config import Gate
from tests.gpu.figures import Figure
from tests.gpu.machine import Machine

SHAPE = (4, 64)
CLOSE = 1e-2


def figures(machine: Machine) -> Iterator[Figure]:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}"
    print(f"{machine.card.name}, {versions}", flush=True)
    x = torch.ones(SHAPE, dtype=torch.bfloat16, device=machine.device)
    want = torch.nn.functional.silu(torch.ones(1))
    yield Figure("error of a kernel", float((gated(x, Gate.SILU).float().cpu() - want).abs().max()), "", most=CLOSE)
    outputs: list[torch.Tensor] = []
    replay = Gpu(machine.card).capture_stream().capture(lambda: outputs.append(gated(x, Gate.SILU)))
    replay()
    yield Figure("error of a captured kernel", float((outputs[-1].float().cpu() - want).abs().max()), "", most=CLOSE)
