"""Convert the errors of torch, CUDA, and Triton to the engine's errors."""

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine.errors import FREE_MEMORY, DeviceLost, OutOfMemory

# Messages of RuntimeErrors that mean exhausted memory. They are from torch on the host, from the driver when it
# allocates pinned memory or loads a kernel, and from cuBLAS, which reports a lack of workspace in both ways.
_MESSAGES = re.compile(
    r"can't allocate memory|CUDA error: out of memory|Triton Error \[CUDA\]: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means exhausted memory, on the host or on a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):  # the system cannot map a file, or start a process
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None


@contextmanager
def raising_out_of_memory() -> Iterator[None]:
    """Convert every error that means exhausted memory to OutOfMemory."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"There is not enough memory: {first_line(error)}", FREE_MEMORY) from error


@contextmanager
def raising_device_lost(synchronize: Callable[[], None]) -> Iterator[None]:
    """Convert an error after which the device does not work to DeviceLost.

    `synchronize` waits for the device. After an illegal access, a hardware fault, or the loss of the GPU's memory, all
    CUDA calls of the process fail. So the next call distinguishes such an error from one that only affects its own
    step.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error) or _works(synchronize):
            raise
        raise DeviceLost(f"The GPU has stopped working: {first_line(error)}", RESTART) from error


RESTART = "Start the program again. If this happens again, look for `Xid` in the output of `sudo dmesg`."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without the hints of CUDA errors, or the error's type if it has
    none.
    """
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _works(synchronize: Callable[[], None]) -> bool:
    try:
        synchronize()
    except RuntimeError:
        return False
    return True
