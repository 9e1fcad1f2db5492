"""What comes before a model is loaded: the options that all models share, and kernels compiled while a person waits.

Refuses to know what kind of model it is.
"""

from app.apart import run_apart
from app.config import Settings
from app.progress import Progress
from engine.loading import LoadOptions, compile_layouts, layouts_are_compiled
from quant.cpu.layouts import Layout


def common_options(settings: Settings) -> LoadOptions:
    """What the settings ask for, whatever the model gives."""
    return LoadOptions(
        backend=settings.kernels,
        context_length=settings.context,
        threads=settings.threads,
        activation_planes=settings.activation_planes,
        cpu_tier=settings.cpu_tier,
        device=settings.device,
        gpu_memory=settings.gpu_memory,
        deterministic=settings.deterministic,
        code_cache=settings.cache_dir,
    )


def prepare_kernels(layouts: frozenset[Layout] | None, options: LoadOptions, progress: Progress) -> None:
    """Compile what loading needs and this machine has not compiled before. None: loading needs no CPU kernels."""
    if not layouts_are_compiled(layouts, options):
        with progress.task("Preparing the CPU engine, once on this machine", None):
            run_apart(lambda: compile_layouts(layouts, options))
