"""Measure how much a model's distributions change if products round their operands, emulated in torch.

    python -m tests.bench.integer_rounding smollm2.gguf

Prints the mean Kullback-Leibler divergence per token from float32, on the license of this repository as in
`tests/engine/backends/cpu/test_divergence.py`. The model must have the vocabulary of SmolLM2. The integers are
those of `quant.kernels.integer_rows`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from app.text.gguf_tokenizer import from_gguf
from engine.backends.reference import ReferenceDevice
from engine.loading import open_checkpoint
from quant.kernels import reference
from quant.linear import ReferenceLinear
from quant.tensor import CodedTensor, GroupedTensor, QTensor
from tests.engine.backends.cpu.test_divergence import WINDOW, compute_with, logprobs

WINDOWS = 4
LICENSE = Path(__file__).parents[2] / "LICENSE"
Round = Callable[[Tensor], Tensor]
Weights = Callable[[QTensor], Tensor]


def to_bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def to_integers(values: Tensor) -> Tensor:
    return _expanded(*reference.integer_inputs(values))[:, : values.shape[1]]


def kept_codes(weight: QTensor) -> Tensor:
    if not isinstance(weight, CodedTensor | GroupedTensor):
        return to_bfloat16(reference.dequantize(weight))
    return _expanded(*reference.integer_weights(weight))[:, : weight.shape[1]]


def _expanded(codes: Tensor, scales: Tensor) -> Tensor:
    return (codes * scales.unsqueeze(-1)).transpose(0, 1).flatten(1)


# name -> rounding of inputs and of weights
ROUNDINGS: dict[str, tuple[Round, Weights]] = {
    "bfloat16": (to_bfloat16, lambda weight: to_bfloat16(reference.dequantize(weight))),
    "8-bit inputs": (to_integers, reference.dequantize),
    "8-bit inputs, rounded weights": (to_integers, lambda weight: to_integers(reference.dequantize(weight))),
    "8-bit inputs, weights of integer products": (to_integers, kept_codes),
}


def main() -> int:
    path = Path(sys.argv[1])
    with open_checkpoint(path) as checkpoint:
        ids = list(from_gguf(checkpoint.metadata.values).encode(LICENSE.read_text(encoding="utf-8")))
    windows = [ids[start : start + WINDOW] for start in range(0, WINDOWS * WINDOW, WINDOW)]
    compute = compute_with(ReferenceDevice(keep_dequantized=False, threads=1), path)
    with mock.patch.object(reference, "ROW_TILE", WINDOW):
        expected = [logprobs(compute, it) for it in windows]
        for name, (of_inputs, of_weights) in ROUNDINGS.items():

            def forward(
                layer: ReferenceLinear, x: Tensor, inputs: Round = of_inputs, weights: Weights = of_weights
            ) -> Tensor:
                return reference.matmul(inputs(x), torch.cat([weights(it) for it in layer.segments]))

            with mock.patch.object(ReferenceLinear, "forward", forward):
                found = [logprobs(compute, it) for it in windows]
            divergences = [(want.exp() * (want - got)).sum(-1) for want, got in zip(expected, found, strict=True)]
            print(f"{name}: {torch.cat(divergences).mean():.1e}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
