"""Measure the rate at which some threads read memory at most. On a shared machine, it changes within minutes."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_BYTES_PER_THREAD = 1 << 27  # larger than the caches
_ROUNDS = 3
_AHEAD = 512  # distance of the prefetches in words of 8 bytes


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(context: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of an element of an array of int64, for one use. The index may be past the end."""

    def emit(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        words = context.make_array(signature.args[0])(context, b, arguments[0])
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), *[ir.IntType(32)] * 3])
        function = b.module.globals.get("llvm.prefetch.p0") or ir.Function(b.module, kind, "llvm.prefetch.p0")
        address = b.bitcast(b.gep(words.data, [arguments[1]]), ir.IntType(8).as_pointer())
        b.call(function, [address, *(ir.Constant(ir.IntType(32), value) for value in (0, 0, 1))])
        return context.get_dummy_value()

    return types.void(array, types.int64), emit


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _read(words: Any) -> int:
    first = second = third = fourth = 0
    for at in range(0, words.size, 8):
        _prefetch(words, at + _AHEAD)
        first ^= words[at] + words[at + 4]
        second ^= words[at + 1] + words[at + 5]
        third ^= words[at + 2] + words[at + 6]
        fourth ^= words[at + 3] + words[at + 7]
    return first ^ second ^ third ^ fourth


class ReadSpeed:
    """Memory that some threads read. Each thread has its own."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._memory = np.ones((threads, _BYTES_PER_THREAD // 8), np.int64)
        _read(self._memory[0, :8])

    def measure(self) -> float:
        """Return the highest rate of three rounds in GB/s."""
        with ThreadPoolExecutor(self.threads) as pool:
            return max(self._round(pool) for _ in range(_ROUNDS))

    def _round(self, pool: ThreadPoolExecutor) -> float:
        start = time.perf_counter()
        list(pool.map(_read, self._memory))
        return self._memory.nbytes / (time.perf_counter() - start) / 1e9
