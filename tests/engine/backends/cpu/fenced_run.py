"""Run steps whose buffers are next to guard pages.

    python -m tests.engine.backends.cpu.fenced_run MODEL CODE_CACHE BEFORE AFTER

The first run has a guard page before each buffer and uses the KV type BEFORE. The second has the guard page after each
buffer and uses AFTER. An access to a guard page ends the process with a signal, so this is a separate program.
"""

import ctypes
import math
import mmap
import random
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.backends.cpu import device
from engine.config import EngineConfig
from engine.kv import cache
from quant.cpu.arena import ALIGNMENT, Arena, Region
from tests.engine.backends.cpu.recorded import advance, load_step, sequence

CONFIG = EngineConfig("cpu", context_length=160, num_blocks=200, max_step_tokens=61, max_running=16, threads=2)
PAGE = mmap.PAGESIZE

_kept: list[mmap.mmap] = []  # keeps mappings alive, so that their addresses are not reused


def fenced(size: int, side: str) -> NDArray[np.uint8]:
    """Return zeros that start right after a guard page, or end less than a cache line before one."""
    whole = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, whole + PAGE)
    _kept.append(memory)
    everything = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    fence = everything.ctypes.data + (0 if side == "before" else whole)
    if libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(PAGE), 0):
        raise OSError(ctypes.get_errno(), "no page can be forbidden")
    start = PAGE if side == "before" else (whole - size) // ALIGNMENT * ALIGNMENT
    return everything[start : start + size]


class FencedArena(Arena):
    """An arena in which each region has its own mapping."""

    side = "after"

    def take(self, name: str, size: int) -> Region:
        return self.adopt(name, fenced(size, self.side))


def main(path: Path, code_cache: Path, side: str, kv_type: torch.dtype) -> None:
    FencedArena.side = side
    vars(device)["Arena"] = FencedArena
    cache.reserve = lambda shape, dtype: (
        torch.from_numpy(fenced(math.prod(shape) * dtype.itemsize, side)).view(dtype).view(shape)
    )
    step, rng, block = load_step(path, code_cache, CONFIG, kv_type=kv_type), random.Random(1), 1
    requests = []
    for number in range(16):
        ids = [rng.randrange(300) for _ in range(160)]
        requests.append(sequence(number, ids, range(block, block := block + 10)))
    requests[-1].block_table[-1] = CONFIG.num_blocks - 1  # the last block of the pool
    while left := [it for it in requests if it.num_computed < 160]:
        # The last step runs all requests, each to the end of its context.
        last = min(it.num_computed for it in requests) >= 150
        chosen = left if last else rng.sample(left, rng.randint(1, len(left)))
        budget, parts = CONFIG.max_step_tokens - len(chosen), []
        for it in chosen:
            end = 160 if last else 155
            more = min(budget, end - it.num_computed - 1, rng.choice([0, 0, 1, 2, 3, 7, 16, 60]))
            if more >= 0:
                budget -= more
                parts.append((it, 1 + more))
        if not parts:
            continue
        batch = advance(parts, vocab_size=300, num_blocks=CONFIG.num_blocks)
        step.fill(batch)
        step.workers.run(len(batch.token_ids), rng.choice([1, 1, 1, 2]))
        if not step.logits(len(batch.logit_rows)).values.isfinite().all():
            raise RuntimeError("not a number")
    print(f"{side}: no access outside of buffers", flush=True)


if __name__ == "__main__":
    for side, kv_type in zip(("before", "after"), sys.argv[3:], strict=True):
        main(Path(sys.argv[1]), Path(sys.argv[2]), side, getattr(torch, kv_type))
