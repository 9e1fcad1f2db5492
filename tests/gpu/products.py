"""Measure products with weights of every kind: few tokens against memory bandwidth, many against the matrix units."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from quant.cuda.backend import CudaBackend
from quant.cuda.linear import CudaLinear
from quant.cuda.matrix import PackedMatrix
from quant.kernels.unpack import unpack
from tests.gpu.figures import Figure, fraction
from tests.gpu.machine import Machine
from tests.gpu.peaks import float8_product
from tests.kernels.shapes import LLAMA_8B, QWEN_32B, TINY, matrices
from tests.kernels.weights import weight

LARGE = 64e6  # bytes of a weight
FLOAT8, FLOAT8_BLOCKS = "e4m3 channel", "e4m3 128x128"


@dataclass(frozen=True, slots=True)
class Series:
    """A kind of weight, and the products to measure with it."""

    kind: str
    model: str
    parts: tuple[str, ...]
    few: tuple[int, ...]  # numbers of tokens whose products are compared with the memory bandwidth
    many: tuple[int, ...]  # numbers of tokens whose products are compared with the peak rate of the matrix units


ALL = ("qkv", "out", "gate_up", "down", "head")
SERIES = (
    Series("Q4_K", "8B", ALL, (1, 4, 16, 32), (512, 2048)),
    Series(FLOAT8, "8B", ALL, (1, 16), (512, 2048)),
    Series("Q6_K", "8B", ("down", "head"), (1,), ()),
    Series("int4 g128 zeros", "8B", ("gate_up",), (1, 16), (2048,)),
    Series("nf4 g64", "8B", ("gate_up",), (1, 16), (2048,)),
    Series("MXFP4", "8B", ("gate_up",), (1, 16), (2048,)),
    Series("Q8_0", "8B", ("gate_up",), (1,), ()),
    Series(FLOAT8_BLOCKS, "8B", ("gate_up",), (1, 16), (2048,)),
    Series("BF16", "8B", ("gate_up",), (1, 16), (2048,)),
    Series("Q4_K", "32B", ALL, (1, 16), (2048,)),
    Series(FLOAT8, "32B", ("qkv", "gate_up", "down"), (1,), (2048,)),
)
DRY = (Series("Q4_0", "tiny", ("out",), (1,), (20,)), Series(FLOAT8, "tiny", ("out",), (1,), ()))
MODELS = {"8B": LLAMA_8B, "32B": QWEN_32B, "tiny": TINY}


def figures(machine: Machine) -> Iterator[Figure]:
    for series in DRY if machine.dry else SERIES:
        for part in series.parts:
            yield from _of_one_matrix(machine, series, part)


def _of_one_matrix(machine: Machine, series: Series, part: str) -> Iterator[Figure]:
    model = MODELS[series.model]
    layers = layers_of(machine, series.kind, *matrices(model)[part])
    for tokens in series.few + series.many:
        x = torch.randn(tokens, layers[0].inputs, device=machine.device).bfloat16()
        seconds = machine.seconds([lambda layer=layer, x=x: layer.multiply(x) for layer in layers])  # type: ignore[misc]
        name = f"{series.kind}, {series.model} {part}, {tokens} tokens"
        if tokens in series.few:
            yield _traffic(machine, name, layers[0].nbytes, seconds, aimed=tokens == 1)
        else:
            yield _operations(machine, name, layers[0], tokens, seconds, series.kind)
    packed = [matrix for layer in layers for matrix in layer.matrices if isinstance(matrix, PackedMatrix)]
    if series.many and packed:
        yield _unpacking(machine, f"{series.kind}, {series.model} {part}, unpacked", packed)


def layers_of(machine: Machine, kind: str, rows: int, columns: int) -> list[CudaLinear]:
    """Return copies of a weight that together exceed the GPU's cache, so that each is read from memory."""
    backend = CudaBackend(
        machine.device, machine.card, deterministic=False, integer_prompts=machine.card.prefers_integers
    )

    def make() -> CudaLinear:
        layer = backend.linear([weight(kind, rows, columns, machine.device)])
        assert isinstance(layer, CudaLinear)
        return layer

    first = make()
    return [first, *(make() for _ in range(machine.copies(first.nbytes) - 1))]


def _traffic(machine: Machine, name: str, nbytes: int, seconds: float, *, aimed: bool) -> Figure:
    rate = nbytes / seconds
    least = (0.8 if nbytes > LARGE else 0.7) if aimed else None
    return Figure(name, rate / 1e9, "GB/s", fraction(rate, machine.peaks.copy), "copy", least)


def _unpacking(machine: Machine, name: str, packed: list[PackedMatrix]) -> Figure:
    """Measure unpacking to bfloat16, in bytes read and written per second.

    Products of many tokens unpack the weight first.
    """
    seconds = machine.seconds([partial(unpack, matrix) for matrix in packed])
    rows, columns = packed[0].shape
    rate = (packed[0].nbytes + 2 * rows * columns) / seconds
    return Figure(name, rate / 1e9, "GB/s", fraction(rate, machine.peaks.copy), "copy")


def _operations(machine: Machine, name: str, layer: CudaLinear, tokens: int, seconds: float, kind: str) -> Figure:
    rate = 2 * tokens * layer.outputs * layer.inputs / seconds
    if kind in (FLOAT8, FLOAT8_BLOCKS) and machine.peaks.float8:
        bare = float8_product(machine, tokens, layer.inputs, layer.outputs)
        return Figure(name, rate / 1e12, "TFLOP/s", rate / bare, "the library's", 0.7)
    return Figure(name, rate / 1e12, "TFLOP/s", fraction(rate, machine.peaks.bfloat16), "bf16 peak")
