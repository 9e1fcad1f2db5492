"""Call compiled kernels from Python. They take and return 64-bit integers; an array is passed as its address."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant.cpu.kernel import KERNELS
from quant.cpu.native import address_of


def call(kernel: Any, *arguments: int | NDArray[Any]) -> int:
    """Return what the kernel returns, or 0 if it returns nothing."""
    made = KERNELS[kernel.symbol]
    assert len(arguments) == len(made.parameters)
    kind = ctypes.CFUNCTYPE(ctypes.c_int64 if made.returns else None, *[ctypes.c_int64] * len(arguments))
    words = [it.ctypes.data if isinstance(it, np.ndarray) else it for it in arguments]
    return kind(address_of(kernel))(*words) or 0


def float_bits(value: float) -> int:
    """Return the bits of a float32 as an integer word."""
    return int(np.float32(value).view(np.uint32))


def bits_float(word: int) -> np.float32:
    return np.uint32(word & 0xFFFFFFFF).view(np.float32)
