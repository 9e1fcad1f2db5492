"""Load options and progress that are common to all models, including the compilation of kernels."""

import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from app.models.stored_model import StoredModel
from app.process.uninterruptible import run_uninterruptible
from app.progress import Progress, Report, Unit
from app.settings.settings import Settings
from engine.backends.device_choice import compile_layouts, layouts_are_compiled, why_code_is_not_cached
from engine.checkpoints.weights import LoadProgress
from engine.config import ALL_FREE, Preemption
from engine.load_options import ANY_DEVICE, KernelReport, LoadControl, LoadOptions
from quant.cpu.layouts import Layout

log = logging.getLogger(__name__)

_NICENESS = 5  # of the process that compiles; with 19 it would hardly run while an engine uses all cores
_POLL_SECONDS = 0.1  # interval at which a stop is noticed

DEFAULT_OPTIONS = LoadOptions()


def common_options(settings: Settings, base: LoadOptions = DEFAULT_OPTIONS) -> LoadOptions:
    """Return the load options of all models: those of the settings, and others from `base`.

    A limit of the GPU memory in `base` replaces that of the settings.
    """
    return replace(
        base,
        backend=settings.kernels,
        context_length=settings.context,
        threads=settings.threads,
        activation_bits=settings.activation_bits,
        cpu_tier=settings.cpu_tier,
        device=settings.device if base.device == ANY_DEVICE else base.device,
        gpu_memory=settings.gpu_memory if base.gpu_memory == ALL_FREE else base.gpu_memory,
        deterministic=settings.deterministic,
        code_cache=settings.cache_dir,
    )


def chat_options(settings: Settings, base: LoadOptions = DEFAULT_OPTIONS) -> LoadOptions:
    """Return the load options of a chat model, as `common_options` does."""
    return replace(
        common_options(settings, base),
        kv_type=settings.kv_type,
        host_cache=settings.kv_host_bytes,
        preemption=Preemption(settings.preemption),
        target_latency=settings.latency_ms / 1000,
        drafts=settings.drafts == "auto",
    )


def lowered_context(settings: Settings, held: int) -> str:
    """Return the warning that the context setting is longer than the model's own context of `held` tokens."""
    return f"The context of the model is {held:,} tokens. {settings.stated('context')} is lowered to that."


def prepare_kernels(layouts: frozenset[Layout] | None, options: LoadOptions, progress: Progress) -> None:
    """Compile the kernels that loading needs and that this machine has not compiled yet. None: no CPU kernels are
    needed.

    Another process compiles them into the cache, because a compiler blocks all threads of the process that it runs in.
    Without a cache, this process compiles. Raises LoadStopped.
    """
    if not layouts_are_compiled(layouts, options):
        label = "Preparing the CPU engine"
        if problem := why_code_is_not_cached(options):
            progress.say(
                f"Compiled kernels cannot be saved in {problem}, so they are compiled at each start. "
                "Choose another folder with INGLE_CACHE_DIR."
            )
        else:
            label += ", once on this machine (about a minute)"
        with progress.task(label, None):
            if options.code_cache and not problem:
                _compile_in_child(layouts, options)
            if not layouts_are_compiled(layouts, options):
                run_uninterruptible(lambda: compile_layouts(layouts, options))


def _compile_in_child(layouts: frozenset[Layout] | None, options: LoadOptions) -> None:
    """Compile kernels into the cache in a process of low priority. Its errors are ignored."""
    needed = LoadOptions(cpu_tier=options.cpu_tier, code_cache=options.code_cache)
    child = multiprocessing.get_context("spawn").Process(target=_compile_quietly, args=(layouts, needed), daemon=True)
    try:
        child.start()
    except OSError as problem:  # this process compiles instead
        log.warning("no process could start to compile kernels: %s", problem)
        return
    try:
        while child.is_alive():
            options.control.check()
            child.join(_POLL_SECONDS)
    finally:
        child.kill()
        child.join()
        child.close()


def _compile_quietly(layouts: frozenset[Layout] | None, options: LoadOptions) -> None:
    """Compile kernels in a child process, which the parent ends if the user presses Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    with suppress(Exception):  # the parent compiles them again, and raises the error
        compile_layouts(layouts, options)


@dataclass(frozen=True, slots=True)
class StoppableProgress:
    """Passes progress on. After the load is stopped, every task raises LoadStopped at its next report."""

    progress: Progress
    control: LoadControl

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        self.control.check()
        with self.progress.task(label, total, unit=unit) as report:

            def check(done: int) -> None:
                self.control.check()
                report(done)

            yield check

    def say(self, line: str) -> None:
        self.progress.say(line)


@dataclass(frozen=True, slots=True)
class LoadReports:
    """Functions that take the progress of loading: what is done, and the total."""

    read: LoadProgress  # bytes of the files
    compiled: KernelReport  # kernels for a GPU


@contextmanager
def loading(stored: StoredModel, progress: Progress) -> Iterator[LoadReports]:
    """Show tasks, one after the other: reading the files, preparing the model, and compiling its kernels for a GPU."""
    with ExitStack() as task:
        report = task.enter_context(progress.task(f"Loading {stored.name}", stored.size))

        def prepare() -> None:
            task.close()
            task.enter_context(progress.task(f"Preparing {stored.name} for this machine", None))

        def read(done: int, total: int) -> None:
            report(done)
            if done == total:
                prepare()

        def compiled(done: int, total: int) -> None:
            nonlocal report
            if done == 0:
                task.close()
                label = "Compiling kernels for this GPU"
                report = task.enter_context(progress.task(label, total, unit="kernels"))
            report(done)
            if done == total:
                prepare()

        yield LoadReports(read, compiled)
