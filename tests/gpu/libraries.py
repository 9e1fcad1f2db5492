"""Compare products of 4-bit weights with those of libraries: INT4 of torch, and NF4 of bitsandbytes if it is installed.

A wheel of bitsandbytes can be among those of `run.sh --wheels`.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tests.gpu.figures import Figure
from tests.gpu.machine import Machine
from tests.gpu.products import layers_of
from tests.kernels.shapes import LLAMA_8B, TINY, matrices

GROUP = 128  # columns that share a scale in torch's INT4
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Library:
    """A library's product with weights of a kind."""

    name: str
    package: str
    kind: str
    make: Callable[[Machine, int, int], Product]  # takes the number of rows and columns


def _torch_int4(machine: Machine, rows: int, columns: int) -> Product:
    operations: Any = torch.ops.aten
    group = min(GROUP, columns)
    scales = torch.rand(columns // group, rows, 2, device=machine.device).bfloat16()  # and zeros
    if machine.dry:
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.int32)
        packed = operations._convert_weight_to_int4pack_for_cpu(codes, 1)
        return lambda x: operations._weight_int4pack_mm_for_cpu(x, packed, group, scales)
    pairs = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=machine.device)
    packed = operations._convert_weight_to_int4pack(pairs, 8)
    return lambda x: operations._weight_int4pack_mm(x, packed, group, scales)


def _bitsandbytes_nf4(machine: Machine, rows: int, columns: int) -> Product:
    package, functional = import_module("bitsandbytes"), import_module("bitsandbytes.functional")
    weight = torch.randn(rows, columns, device=machine.device).bfloat16()
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    return lambda x: package.matmul_4bit(x, packed.t(), quant_state=state)


LIBRARIES = (
    Library("torch", "torch", "int4 g128 zeros", _torch_int4),
    Library("bitsandbytes", "bitsandbytes", "nf4 g64", _bitsandbytes_nf4),
)


def figures(machine: Machine) -> Iterator[Figure]:
    for library in LIBRARIES:
        if find_spec(library.package) is None:
            print(f"{library.package} is not installed", file=sys.stderr)
            continue
        for part in ("out",) if machine.dry else ("out", "gate_up", "down"):
            yield from _of_one_matrix(machine, library, part)


def _of_one_matrix(machine: Machine, library: Library, part: str) -> Iterator[Figure]:
    rows, columns = matrices(TINY if machine.dry else LLAMA_8B)[part]
    ours = layers_of(machine, library.kind, rows, columns)
    theirs = [library.make(machine, rows, columns) for _ in ours]
    for tokens in (1,) if machine.dry else (1, 16, 2048):
        x = torch.randn(tokens, columns, device=machine.device).bfloat16()
        theirs_seconds = machine.seconds([lambda product=product, x=x: product(x) for product in theirs])  # type: ignore[misc]
        seconds = machine.seconds([lambda layer=layer, x=x: layer.multiply(x) for layer in ours])  # type: ignore[misc]
        name = f"{library.kind}, {part}, {tokens} token{'s' if tokens > 1 else ''}"
        yield Figure(f"{name}: {library.name}", 1e3 * theirs_seconds, "ms")
        yield Figure(f"{name}: ours", 1e3 * seconds, "ms", theirs_seconds / seconds, library.name)
