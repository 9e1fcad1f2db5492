"""Small kernels that show whether Triton can compile, load, and run kernels on a GPU, and start them early."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.gpu import Gpu
from engine.backends.device_errors import first_line
from quant.kernels.early_start import launch_options, wait_for_inputs

COUNT = tl.constexpr(256)
PROGRAMS = 512  # more than a multiprocessor holds
LAUNCHES = 32  # of a chain; an even number


@triton.jit
def _trial_kernel(numbers: tl.tensor, out: tl.tensor) -> None:
    at = tl.arange(0, COUNT)
    tl.store(out + at, tl.load(numbers + at) * 3 + 1)


@triton.jit
def _chain_kernel(numbers: tl.tensor, out: tl.tensor, EARLY: tl.constexpr) -> None:
    """Read what the next program of the launch before wrote."""
    wait_for_inputs(EARLY)
    program, at = tl.program_id(0), tl.arange(0, COUNT)
    source = (program + 1) % tl.num_programs(0)
    tl.store(out + program * COUNT + at, (tl.load(numbers + source * COUNT + at) * 3 + 1) & 0xFFFF)


def why_kernels_fail(gpu: Gpu) -> str:
    """Run a kernel, and return why it fails; empty if it works.

    Triton raises errors of any type: for a driver library that it cannot find, a compiler that does not know the GPU,
    or exhausted memory.
    """
    try:
        with gpu.current():
            numbers = torch.arange(COUNT.value, dtype=torch.int32)
            out = torch.zeros(COUNT.value, dtype=torch.int32, device=gpu.device)
            _trial_kernel[(1,)](numbers.to(gpu.device), out)
            right = torch.equal(out.cpu(), numbers * 3 + 1)
    except Exception as error:  # noqa: BLE001
        return f"a test kernel failed: {first_line(error)}"
    return "" if right else "a test kernel computed wrong numbers"


def why_early_start_fails(gpu: Gpu) -> str:
    """Replay a graph of kernels that start early, and return why it fails; empty if it works."""
    numbers = torch.arange(PROGRAMS * COUNT.value, dtype=torch.int32).view(PROGRAMS, -1) & 0xFFFF
    want = numbers
    for _ in range(LAUNCHES):
        want = (want.roll(-1, 0) * 3 + 1) & 0xFFFF
    try:
        with gpu.current():
            own = numbers.to(gpu.device)
            replay = gpu.capture_stream().capture(lambda: _launch_chain(own, gpu))
            own.copy_(numbers)
            replay()
            right = torch.equal(own.cpu(), want)
    except Exception as error:  # noqa: BLE001 # as above
        return first_line(error)
    return "" if right else "the results are wrong"


def _launch_chain(numbers: Tensor, gpu: Gpu) -> None:
    other = torch.empty_like(numbers)
    for _ in range(LAUNCHES // 2):
        for source, target in ((numbers, other), (other, numbers)):
            _chain_kernel[(PROGRAMS,)](source, target, **launch_options(gpu.card.starts_early))
