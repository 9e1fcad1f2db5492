"""Options and arguments that several commands share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from app.models.store import ModelStore
from app.settings.settings import load_settings
from quant.errors import InglenookError


def read_by(read: Callable[[str], int]) -> Callable[[click.Context, click.Parameter, str | None], int | None]:
    """A callback of an option whose value is read from a text."""

    def callback(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
        try:
            return None if value is None else read(value)
        except ValueError as problem:
            raise click.BadParameter(str(problem)) from None

    return callback


Command = TypeVar("Command", bound=Callable[..., Any])

GPU_OPTIONS = ("device", "gpu_memory", "deterministic")


def gpu_options(command: Command) -> Command:
    for option in (
        click.option("--deterministic", is_flag=True, default=None, help="The same reply alone and among others."),
        click.option("--gpu-memory", metavar="SIZE", help="What to take of a GPU's memory, at most: 20GB, or 80%."),
        click.option("--device", help="Where to compute: auto, cpu, cuda, or cuda:1 for the second GPU."),
    ):
        command = option(command)
    return command


def stored_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Of commands that need a model that is there."""
    store = _store()
    return _items([model.name for model in store.entries()] if store else [], incomplete)


def known_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Of commands that take any."""
    store = _store()
    if store is None:
        return []
    names = [entry.name for entry in store.catalog] + [model.name for model in store.families]
    return _items([*names, *(model.name for model in store.entries())], incomplete)


def _store() -> ModelStore | None:
    """None where settings make no sense: this is no moment to say so."""
    try:
        return ModelStore(load_settings())
    except InglenookError:
        return None


def _items(names: list[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in dict.fromkeys(names) if name.startswith(incomplete)]
