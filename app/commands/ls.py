"""`ingle ls`: list the models on this machine."""

from dataclasses import asdict

import click

from app.commands.output import as_json, echo_wide_table
from app.models.store import ModelStore
from app.models.stored_model import last_use
from app.models.transfer.download_turn import running_download
from app.progress import format_bytes
from app.settings.boxes import read_boxes
from app.settings.settings import Settings, load_settings
from quant.errors import InglenookError

EXAMPLES = """\b
Examples:
  ingle ls
  ingle ls --catalog          models with a short name, such as qwen3:4b or qwen3:4b-q8_0
  ingle ls --json | jq -r '.[].path'
"""


@click.command(epilog=EXAMPLES)
@click.option("--catalog", is_flag=True, help="List the models with a short name, stored or not.")
@click.option("--json", "as_array", is_flag=True, help="Print a JSON array.")
def ls(catalog: bool, as_array: bool) -> None:
    """List the models on this machine, and those of your other machines.

    The list includes models in the Hugging Face cache, and models of Ollama and LM Studio. USED is the day on which
    ingle last loaded a model. PATH names the other machine, which ingle box add has added. --json lists this machine
    only.
    """
    settings = load_settings()
    store = ModelStore(settings)
    if catalog:
        _ls_catalog(store, as_array=as_array)
        return
    models = store.entries()
    used = [last_use(model, settings.models_dir) for model in models]
    if as_array:
        click.echo(as_json([{**asdict(model), "used_at": use} for model, use in zip(models, used, strict=True)]))
        _echo_unfinished(store, settings)
        return
    rows = [
        (m.name, format_bytes(m.size), m.quantization or "-", _day(m.stored_at), _day(use), str(m.path))
        for m, use in zip(models, used, strict=True)
    ]
    rows += _rows_of_boxes(settings)
    if rows:
        echo_wide_table([("NAME", "SIZE", "QUANT", "STORED", "USED", "PATH"), *rows])
    else:
        click.echo(f"No model is stored yet.\ntry: ingle pull {settings.model}", err=True)
    _echo_unfinished(store, settings)


def _rows_of_boxes(settings: Settings) -> list[tuple[str, str, str, str, str, str]]:
    """Return a row for each model of the user's other machines. Prints which of them are away."""
    boxes = read_boxes(settings.state_dir)
    if not boxes:
        return []
    import asyncio

    from app.client.boxes import models_of_all

    rows = []
    for name, answer in asyncio.run(models_of_all(boxes.values())).items():
        if isinstance(answer, InglenookError):
            click.echo(f"{name} is away: {answer.message}.", err=True)
        else:
            size = (format_bytes(model.size) if model.size else "-" for model in answer)
            rows += [(model.name, it, "-", "-", "-", f"on {name}") for model, it in zip(answer, size, strict=True)]
    return rows


def _echo_unfinished(store: ModelStore, settings: Settings) -> None:
    """Print the running download and the unfinished ones."""
    for one in store.hub_models.unfinished():
        there = format_bytes(one.arrived)
        click.echo(f"{one.name} is incomplete ({there} downloaded). ingle pull {one.name} resumes it.", err=True)
    if running := running_download(settings.models_dir):
        total = f" of {format_bytes(running.total)}" if running.total else ""
        click.echo(f"{running.name} is being downloaded: {format_bytes(running.done)}{total}.", err=True)


def _ls_catalog(store: ModelStore, *, as_array: bool) -> None:
    if as_array:
        known = ({**asdict(model), "repository": model.repository.repo} for model in store.families)
        pinned = ({"name": entry.name, "title": entry.title, "license": entry.license} for entry in store.catalog)
        click.echo(as_json([*pinned, *known]))
        return
    rows = [(entry.name, "chat", "-", entry.license, "-", entry.title) for entry in store.catalog]
    rows += [(m.name, m.kind, f"{m.context:,}", m.license, m.draft or "-", m.repository.repo) for m in store.families]
    echo_wide_table([("NAME", "KIND", "CONTEXT", "LICENSE", "DRAFT", "REPOSITORY"), *rows])


def _day(moment: str | None) -> str:
    return (moment or "-")[:10]
