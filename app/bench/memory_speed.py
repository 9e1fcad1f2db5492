"""Measures the read bandwidth of memory, which limits decoding on a CPU."""

import time
from concurrent.futures import ThreadPoolExecutor

_LEAST_BYTES, _LEAST_BYTES_PER_THREAD = 1 << 29, 1 << 26  # larger than the caches
_ROUNDS = 5


def read_bandwidth(threads: int) -> tuple[float, float]:
    """Return the lowest and the highest rate at which `threads` threads read memory in five rounds, in GB/s."""
    import numpy as np

    size = max(_LEAST_BYTES // threads, _LEAST_BYTES_PER_THREAD)
    memory = np.ones((threads, size), np.uint8)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            list(pool.map(np.max, memory))  # numpy releases the lock, and compares as many bytes as a register holds
            rates.append(memory.size / (time.perf_counter() - start) / 1e9)
    return round(min(rates), 1), round(max(rates), 1)
