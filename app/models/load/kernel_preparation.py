"""What all models share when they are loaded: the options, and what a person who waits is told, of kernels that are
compiled, too.

Refuses to know what kind of model it is.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from app.models.stored_model import StoredModel
from app.process.uninterruptible import run_uninterruptible
from app.progress import Progress
from app.settings.settings import Settings
from engine.backends.device_choice import compile_layouts, layouts_are_compiled, why_code_is_not_cached
from engine.checkpoints.weights import LoadProgress
from engine.load_options import LoadOptions
from quant.cpu.layouts import Layout


def common_options(settings: Settings) -> LoadOptions:
    """What the settings ask for, whatever the model gives."""
    return LoadOptions(
        backend=settings.kernels,
        context_length=settings.context,
        threads=settings.threads,
        activation_bits=settings.activation_bits,
        cpu_tier=settings.cpu_tier,
        device=settings.device,
        gpu_memory=settings.gpu_memory,
        deterministic=settings.deterministic,
        code_cache=settings.cache_dir,
    )


def lowered_context(settings: Settings, held: int) -> str:
    """The warning about a context longer than the model's own, which holds so many tokens."""
    return f"The model holds {held:,} tokens: {settings.stated('context')} is lowered to that."


def prepare_kernels(layouts: frozenset[Layout] | None, options: LoadOptions, progress: Progress) -> None:
    """Compile what loading needs and this machine has not compiled before. None: loading needs no CPU kernels."""
    if not layouts_are_compiled(layouts, options):
        label = "Preparing the CPU engine"
        if problem := why_code_is_not_cached(options):
            progress.say(
                f"Compiled kernels cannot be kept in {problem}, and are compiled at each start. "
                "Choose another folder with INGLE_CACHE_DIR."
            )
        else:
            label += ", once on this machine"
        with progress.task(label, None):
            run_uninterruptible(lambda: compile_layouts(layouts, options))


@contextmanager
def loading(stored: StoredModel, progress: Progress) -> Iterator[LoadProgress]:
    """Two tasks on end: to read the files, and what else there is to do before the model computes. On a GPU kernels are
    compiled then that were not before."""
    with ExitStack() as task:
        report = task.enter_context(progress.task(f"Loading {stored.name}", stored.size))

        def read(done: int, total: int) -> None:
            report(done)
            if done == total:
                task.close()
                task.enter_context(progress.task(f"Preparing {stored.name} for this machine", None))

        yield read
