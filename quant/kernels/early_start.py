"""Programmatic dependent launch, from sm_90 on: a kernel starts while the kernel before it is still running.

The programs of an early kernel start when all programs of the kernel before have started and a multiprocessor has room.
They may prefetch what no kernel writes, such as weights. Before they read or write anything else, they call
`wait_for_inputs`, which returns when the kernel before has ended and its results are visible. This kernel has ended
after its own wait, so all earlier kernels have ended as well. A CUDA graph keeps this order.

Source: "Programmatic Dependent Launch" in NVIDIA's CUDA Programming Guide.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launch_options(early: bool) -> dict[str, bool]:
    """Return arguments of a launch: the constant EARLY of the kernel, and Triton's option."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr) -> None:
    """Wait for the kernel before, and let the next one start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(at: tl.tensor) -> None:
    """Load the cache lines at these addresses to the L2 cache. Only early kernels may call this."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )
