"""Command-line options and arguments that several commands share."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from app.settings.settings import load_settings
from quant.errors import InglenookError

if TYPE_CHECKING:
    from app.models.store import ModelStore

Value = TypeVar("Value", int, float)


def read_by(read: Callable[[str], Value]) -> Callable[[click.Context, click.Parameter, str | None], Value | None]:
    """Return an option callback that parses the value with `read`."""

    def callback(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Value | None:
        try:
            return None if value is None else read(value)
        except ValueError as problem:
            raise click.BadParameter(str(problem)) from None

    return callback


Command = TypeVar("Command", bound=Callable[..., Any])

ENGINE_OPTIONS = (
    "context", "threads", "device", "gpu_memory", "deterministic", "kernels", "quantize", "draft", "kv_disk_gb",
)  # fmt: skip

model_option = click.option(
    "-m",
    "--model",
    help="Model to use: a short name, a Hugging Face repository, or the path of a GGUF file or a folder. "
    "Default: smollm2:135m.",
)
context_option = click.option(
    "--context",
    type=int,
    help="Context length: limit of prompt and answer together, in tokens. Default: the longest that the model "
    "supports and memory allows.",
)
threads_option = click.option(
    "--threads", type=int, help="Threads of the CPU engine. Default: one per core, fewer on a busy machine."
)
kernels_option = click.option(
    "--kernels", help="Kernels of the engine: auto, cuda, cpu, or reference. Default: auto, the fastest ones."
)
server_port_option = click.option(
    "--port", type=int, help="Port of the server, as ingle ps lists it. Default: the only one, or that of the settings."
)
_GPU_OPTIONS = (
    click.option(
        "--device", help="Device to compute on: auto, cpu, cuda, or cuda:1 for the second GPU. Default: auto."
    ),
    click.option(
        "--gpu-memory",
        metavar="SIZE",
        help="Limit of the GPU memory to use: 20GB, or 80% of all. Default: auto, which leaves some to other programs.",
    ),
    click.option(
        "--deterministic",
        is_flag=True,
        default=None,
        help="On a GPU, return bitwise the same output regardless of batching (slower).",
    ),
)
_ENGINE_OPTIONS = (
    context_option,
    threads_option,
    *_GPU_OPTIONS,
    kernels_option,
    click.option(
        "--quantize",
        metavar="METHOD",
        help="Quantize 16- and 32-bit layers while loading: fp8, int4, or nf4. Default: none.",
    ),
    click.option(
        "--draft",
        metavar="MODEL",
        help="Small model with the same vocabulary that drafts tokens, which changes only the speed. auto: the known "
        "one of the family. Default: none.",
    ),
    click.option(
        "--kv-disk-gb",
        metavar="GB",
        help="Size limit of the on-disk KV cache in GB; 0 disables it. Default: auto, a tenth of the free disk space.",
    ),
)


def gpu_options(command: Command) -> Command:
    """Add the options that only concern a GPU."""
    return _with(_GPU_OPTIONS, command)


def engine_options(command: Command) -> Command:
    """Add the options of the engine. ENGINE_OPTIONS names their settings."""
    return _with(_ENGINE_OPTIONS, command)


def _with(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):  # click lists options in the reverse order of their decorators
        command = option(command)
    return command


def stored_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a stored model."""
    store = _store()
    return _items([model.name for model in store.entries()] if store else [], incomplete)


def known_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a model, stored or not."""
    store = _store()
    if store is None:
        return []
    names = [entry.name for entry in store.catalog] + [model.name for model in store.families]
    return _items([*names, *(model.name for model in store.entries())], incomplete)


def _store() -> "ModelStore | None":
    """Return the model store, or None if the settings are invalid: shell completion must not print errors."""
    from app.models.store import ModelStore

    try:
        return ModelStore(load_settings())
    except InglenookError:
        return None


def _items(names: list[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in dict.fromkeys(names) if name.startswith(incomplete)]
