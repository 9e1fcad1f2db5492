"""The names of models that a shell completes: those that are stored, and those that have a short name."""

import click
from click.shell_completion import CompletionItem

from app.config import load_settings
from app.models.store import ModelStore
from quant.errors import InglenookError


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
