"""Compile kernels in several processes, before they are launched.

Triton compiles a kernel at its first launch, on the thread that launches it, which takes 0.5 to 2.5 seconds. Here a
function's launches are skipped, and a hook of Triton records the kernels that this process has not launched before.
Processes compile them into Triton's cache on disk, from which later launches load them.
"""

import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from threading import get_ident
from typing import Any

log = logging.getLogger(__name__)

# Fewer kernels are compiled when they are launched: a process needs some seconds to start.
MIN_KERNELS = 4
MAX_PROCESSES = 8  # each takes about 0.5 GB of host memory
POLL_SECONDS = 0.2  # interval at which a stop is noticed
Report = Callable[[int, int], None]  # takes the numbers of compiled kernels and of all kernels


@dataclass(frozen=True)
class KernelVariant:
    """A kernel with everything that its machine code depends on. Can be pickled."""

    module: str
    name: str
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]  # of Triton's compiler
    target: tuple[str, int, int]  # backend, architecture, and threads of a warp

    def compile(self) -> None:
        """Compile the kernel into Triton's cache on disk. Needs no GPU."""
        import triton

        triton.compile(self._source(), target=self._target(), options=dict(self.options))

    def is_cached(self) -> bool:
        """Whether Triton's cache has the kernel."""
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.compiler import make_backend
        from triton.runtime.cache import get_cache_key, get_cache_manager

        source, backend = self._source(), make_backend(self._target())
        options = backend.parse_options({**self.options, **source.parse_options()})
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        group = get_cache_manager(sha256(key.encode()).hexdigest()).get_group(f"{source.name[:150]}.json")
        return bool(group)

    def _source(self) -> Any:
        from triton.compiler import ASTSource

        kernel = getattr(import_module(self.module), self.name)
        return ASTSource(kernel, dict(self.signature), dict(self.constants), dict(self.attributes))

    def _target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*self.target)


@contextmanager
def recording_kernels() -> Iterator[list[KernelVariant]]:
    """Skip all launches of this thread, and record the kernels that this process has not launched before.

    Launches of known kernels are skipped as well: they would read what the skipped ones have not written.
    """
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: dict[str, KernelVariant] = {}
    variants: list[KernelVariant] = []
    target = driver.active.get_current_target()
    thread, run = get_ident(), JITFunction.run

    def run_unless_recording(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *arguments, warmup=warmup or get_ident() == thread, **options)

    def record(*, key: str, fn: Any, compile: Mapping[str, Any], **other: object) -> bool:  # noqa: A002 # Triton's names
        if get_ident() != thread:
            return False
        options = json.loads(compile["specialization_data"])["options"]
        (attributes,) = compile["configs"]
        found[f"{fn.module}.{fn.name} {key}"] = KernelVariant(
            fn.module,
            fn.name,
            compile["signature"],
            compile["constants"],
            attributes,
            {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
            (target.backend, target.arch, target.warp_size),
        )
        return True

    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = record
        JITFunction.run = run_unless_recording
        try:
            yield variants
        finally:
            JITFunction.run = run
    variants += found.values()


def compile_kernels(
    variants: Iterable[KernelVariant], report: Report, check: Callable[[], None] = lambda: None
) -> None:
    """Compile the kernels that Triton's cache does not have. A kernel that does not compile is logged.

    An error of `check` ends the compilation, and the processes.
    """
    missing = [variant for variant in variants if not variant.is_cached()]
    if len(missing) < MIN_KERNELS:
        return
    report(0, len(missing))
    processes = min(MAX_PROCESSES, os.cpu_count() or 1, len(missing))
    # A forked process would share the state of CUDA, which does not survive a fork.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    try:
        _compile_in(pool, missing, report, check)
    except BaseException:
        for process in tuple(pool._processes.values()):  # public functions that do so are new in Python 3.14
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _compile_in(
    pool: ProcessPoolExecutor, missing: Sequence[KernelVariant], report: Report, check: Callable[[], None]
) -> None:
    compiling = {pool.submit(variant.compile): variant for variant in missing}
    left = set(compiling)
    while left:
        finished, left = wait(left, POLL_SECONDS, FIRST_COMPLETED)
        check()
        for future in finished:
            if error := future.exception():
                log.warning("the kernel %s could not be compiled in advance: %s", compiling[future].name, error)
        if finished:
            report(len(missing) - len(left), len(missing))


class FirstLaunches:
    """Counts the kernels that this process launches for the first time, and so compiles or loads."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self) -> None:
        """Start to count. A later call for another object ends the count of this one."""
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self._add

    def _add(self, **launch: object) -> None:
        self.count += 1
