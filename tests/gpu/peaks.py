"""How fast the machine is by the vendor's own libraries: what all other figures are fractions of."""

from collections.abc import Iterator

import torch

from tests.gpu.figures import BFLOAT16, COPY, FLOAT8, TO_DEVICE, TO_HOST, Figure
from tests.gpu.machine import Machine


def figures(machine: Machine) -> Iterator[Figure]:
    yield Figure(COPY, _copy(machine) / 1e9, "GB/s")
    yield Figure(BFLOAT16, _product(machine) / 1e12, "TFLOP/s")
    if machine.card.multiplies_float8 and not machine.dry:
        yield Figure(FLOAT8, float8_product(machine, 8192, 8192, 8192) / 1e12, "TFLOP/s")
    size = machine.scaled(1 << 29, 1 << 12)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=not machine.dry)
    there = torch.empty(size, dtype=torch.uint8, device=machine.device)
    into = machine.seconds_apart(lambda: there.copy_(here, non_blocking=True))
    back = machine.seconds_apart(lambda: here.copy_(there, non_blocking=True))
    yield Figure(TO_DEVICE, size / into / 1e9, "GB/s")
    yield Figure(TO_HOST, size / back / 1e9, "GB/s")


def _copy(machine: Machine) -> float:
    """Bytes read and written in a second."""
    size = machine.scaled(1 << 31, 1 << 12)
    source, target = torch.empty(2, size, dtype=torch.uint8, device=machine.device).random_()
    return 2 * size / machine.seconds([lambda: target.copy_(source)])


def _product(machine: Machine) -> float:
    """Operations in a second."""
    size = machine.scaled(8192, 64)
    a, b = torch.randn(2, size, size, device=machine.device).bfloat16()
    return 2 * size**3 / machine.seconds([lambda: a @ b])


def float8_product(machine: Machine, tokens: int, inputs: int, outputs: int) -> float:
    """Operations in a second of the library's product, scales by row and column, activations quantized before."""
    a = torch.randn(tokens, inputs, device=machine.device).to(torch.float8_e4m3fn)
    b = torch.randn(outputs, inputs, device=machine.device).to(torch.float8_e4m3fn).mT
    scale_a, scale_b = torch.ones(tokens, 1, device=machine.device), torch.ones(1, outputs, device=machine.device)
    seconds = machine.seconds(
        [lambda: torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)]
    )
    return 2 * tokens * inputs * outputs / seconds
