"""Measure the machine's peak rates with the vendor's libraries. Other figures are compared with them."""

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
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=not machine.dry)
    on_device = torch.empty(size, dtype=torch.uint8, device=machine.device)
    to_device = machine.seconds_without_graph(lambda: on_device.copy_(on_host, non_blocking=True))
    to_host = machine.seconds_without_graph(lambda: on_host.copy_(on_device, non_blocking=True))
    yield Figure(TO_DEVICE, size / to_device / 1e9, "GB/s")
    yield Figure(TO_HOST, size / to_host / 1e9, "GB/s")


def _copy(machine: Machine) -> float:
    """Return bytes read and written per second, by the faster of the driver's copy and a kernel."""
    size = machine.scaled(1 << 31, 1 << 12)
    source, target = torch.empty(2, size, dtype=torch.uint8, device=machine.device).random_()
    whole, result = source.view(torch.int32), target.view(torch.int32)
    calls = (lambda: target.copy_(source), lambda: torch.bitwise_not(whole, out=result))
    return 2 * size / min(machine.seconds([call]) for call in calls)


def _product(machine: Machine) -> float:
    """Return operations per second."""
    size = machine.scaled(8192, 64)
    a, b = torch.randn(2, size, size, device=machine.device).bfloat16()
    return 2 * size**3 / machine.seconds([lambda: a @ b])


def float8_product(machine: Machine, tokens: int, inputs: int, outputs: int) -> float:
    """Return operations per second of the library's FP8 product, without quantizing activations.

    It has one scale for each matrix, because scales of rows raise an error on some cards (PyTorch issue 192707).
    """
    a = torch.randn(tokens, inputs, device=machine.device).to(torch.float8_e4m3fn)
    b = torch.randn(outputs, inputs, device=machine.device).to(torch.float8_e4m3fn).mT
    scale = torch.ones((), device=machine.device)
    seconds = machine.seconds([lambda: torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)])
    return 2 * tokens * inputs * outputs / seconds
