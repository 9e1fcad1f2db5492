"""A small kernel that shows whether Triton can compile, load, and run kernels on a GPU."""

import torch
import triton
import triton.language as tl

from engine.backends.cuda.gpu import Gpu
from engine.backends.device_errors import first_line

COUNT = tl.constexpr(256)


@triton.jit
def _trial_kernel(numbers: tl.tensor, out: tl.tensor) -> None:
    at = tl.arange(0, COUNT)
    tl.store(out + at, tl.load(numbers + at) * 3 + 1)


def why_kernels_fail(gpu: Gpu) -> str:
    """Run the kernel, and return why it fails; empty if it works.

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
