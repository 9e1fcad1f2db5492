"""Print the memory that loads of a model take at most: `python -m tests.engine.measured_load MODEL CACHE SHARE ...`.

Each SHARE, from 0 to 1, is between the least and the most memory of the plan. A line has the allotted bytes, the
bytes that the process grew by, and the context length. A separate process is measured, because other tests of a
process leave memory that is freed or used again meanwhile.
"""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from engine.fit import MemoryPlan, plan_memory
from engine.freed_memory import return_freed_memory, share_pools
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.sampling_params import SamplingParams
from engine.system_memory import resident_bytes

POOL = 48 << 20  # bytes


def options_of(cpu_kernels: Path, context: int = 0) -> LoadOptions:
    return LoadOptions(backend="cpu", threads=2, host_cache=POOL, code_cache=cpu_kernels, context_length=context)


def plan_of(path: Path, options: LoadOptions) -> MemoryPlan:
    with open_checkpoint(path) as checkpoint:
        return plan_memory(checkpoint, options)


def load(path: Path, options: LoadOptions) -> ModelEngine:
    with open_checkpoint(path) as checkpoint:
        return load_engine(checkpoint, options)


def use_all(engine: ModelEngine) -> None:
    """Run a request, and write every byte of all pools."""
    engine.add(engine.request(tuple(range(10, 400)), SamplingParams(max_tokens=4, ignore_eos=True), frozenset()))
    while engine.has_requests:
        engine.step()
    kv = engine._runner._model.kv  # type: ignore[attr-defined]
    for pool in (*kv.pools, *kv.host_pools):
        pool.fill_(1)


@contextmanager
def measuring_peak() -> Iterator[list[int]]:
    """Measure the growth of the memory that no file backs. The list receives the largest one at the end."""
    peak, ending, result = 0, threading.Event(), list[int]()

    def watch() -> None:
        nonlocal peak
        while not ending.wait(0.001):
            peak = max(peak, resident_bytes() or 0)

    return_freed_memory()
    before = resident_bytes() or 0
    watcher = threading.Thread(target=watch)
    watcher.start()
    yield result
    peak = max(peak, resident_bytes() or 0)
    ending.set()
    watcher.join()
    result.append(peak - before)


def main() -> None:
    share_pools()  # as in a server
    model, options = Path(sys.argv[1]), options_of(Path(sys.argv[2]))
    plan = plan_of(model, options)
    use_all(load(model, replace(options, context_length=512)))  # compiled code is not memory of a model
    for share in map(float, sys.argv[3:]):
        gc.collect()
        allotted = plan.least + int(share * (plan.most - plan.least))
        with measuring_peak() as peak:
            engine = load(model, plan.allotted(options, allotted))
            use_all(engine)
        print(allotted, peak[0], engine.config.context_length)
        del engine


if __name__ == "__main__":
    main()
