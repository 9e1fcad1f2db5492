"""Measure how much a model's distributions change if products round their operands, emulated in torch.

    python -m tests.bench.integer_rounding smollm2.gguf

Prints the mean Kullback-Leibler divergence per token from float32, on the license of this repository as in
`tests/engine/backends/cpu/test_divergence.py`. The model must have the vocabulary of SmolLM2. The rounding to integers
is that of `quant.kernels.integer_rows`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from app.text.gguf_tokenizer import from_gguf
from engine.backends.reference import ReferenceDevice
from engine.loading import open_checkpoint
from quant.kernels import reference
from quant.kernels.integer_rows import SPAN
from quant.linear import ReferenceLinear
from tests.engine.backends.cpu.test_divergence import WINDOW, compute_with, logprobs

WINDOWS = 4
LICENSE = Path(__file__).parents[2] / "LICENSE"
Round = Callable[[Tensor], Tensor]


def exact(values: Tensor) -> Tensor:
    return values


def to_bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def to_integers(values: Tensor) -> Tensor:
    width = values.shape[-1]
    spans = F.pad(values, (0, -width % SPAN)).reshape(len(values), -1, SPAN)
    scales = spans.abs().amax(-1, keepdim=True).clamp_min(2.0**-100) / 127
    return ((spans / scales).round() * scales).reshape(len(values), -1)[:, :width]


# name -> rounding of inputs and of weights
ROUNDINGS: dict[str, tuple[Round, Round]] = {
    "bfloat16": (to_bfloat16, to_bfloat16),
    "8-bit inputs": (to_integers, exact),
    "8-bit inputs and weights": (to_integers, to_integers),
}


def main() -> int:
    path = Path(sys.argv[1])
    with open_checkpoint(path) as checkpoint:
        ids = list(from_gguf(checkpoint.metadata.values).encode(LICENSE.read_text(encoding="utf-8")))
    windows = [ids[start : start + WINDOW] for start in range(0, WINDOWS * WINDOW, WINDOW)]
    compute = compute_with(ReferenceDevice(keep_dequantized=True, threads=1), path)
    with mock.patch.object(reference, "ROW_TILE", WINDOW):
        expected = [logprobs(compute, it) for it in windows]
        for name, (of_inputs, of_weights) in ROUNDINGS.items():

            def forward(
                layer: ReferenceLinear, x: Tensor, inputs: Round = of_inputs, weights: Round = of_weights
            ) -> Tensor:
                return reference.matmul(inputs(x), weights(layer.dequantize()))

            with mock.patch.object(ReferenceLinear, "forward", forward):
                found = [logprobs(compute, it) for it in windows]
            divergences = [(want.exp() * (want - got)).sum(-1) for want, got in zip(expected, found, strict=True)]
            print(f"{name}: {torch.cat(divergences).mean():.1e}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
