"""`ingle search`: search the Hub for models, and list those that fit this machine first."""

import click

from app.commands.options import read_by
from app.commands.output import as_json, echo_table
from app.errors import EXIT_NOT_FOUND, Offline
from app.models.hub_search import FORMATS, SHORT_NAMES, SearchResult, search_hub, search_short_names
from app.models.store import ModelStore
from app.progress import format_bytes, progress_on_stderr
from app.settings.settings import load_settings
from app.settings.values import memory_size

EXAMPLES = """\b
Examples:
  ingle search qwen3 coder
  ingle search llama 3.1 --format awq
  ingle search embedding --json | jq -r '.[0].name'
"""

_LIMIT = 20


@click.command(epilog=EXAMPLES)
@click.argument("words", nargs=-1, required=True)
@click.option(
    "--format",
    "formats",
    type=click.Choice(FORMATS),
    multiple=True,
    help="Search only for models of this format. Repeatable.",
)
@click.option(
    "--limit", type=click.IntRange(1, 100), default=_LIMIT, help=f"Maximum number of models. Default: {_LIMIT}."
)
@click.option(
    "--memory",
    metavar="SIZE",
    callback=read_by(memory_size),
    help="Assume this much device memory, such as 8GB. Default: the free memory.",
)
@click.option("--json", "as_array", is_flag=True, help="Print a JSON array.")
@click.pass_context
def search(
    ctx: click.Context,
    words: tuple[str, ...],
    formats: tuple[str, ...],
    limit: int,
    memory: int | None,
    as_array: bool,
) -> None:
    """Search the Hugging Face Hub by WORDS for models in GGUF, AWQ, GPTQ, or FP8.

    Models that fit in free memory come first, sorted by downloads. FITS is an estimate by the size of the files; ingle
    fit NAME is exact. If the Hub cannot be reached, only models with a short name are searched. The exit status is 3 if
    nothing is found.
    """
    settings, progress = load_settings(), progress_on_stderr(quiet=as_array)
    asked = " ".join(words)
    try:
        if settings.offline:
            raise Offline(f"offline mode is on ({settings.origins['offline']})")
        found = search_hub(asked, formats or FORMATS, limit, settings, progress, memory or 0)
    except Offline as problem:
        click.echo(f"{problem.message}: {SHORT_NAMES}.", err=True)
        found = search_short_names(asked, ModelStore(settings), settings, memory or 0)[:limit]
    _echo(found, as_array=as_array)
    if not found:
        ctx.exit(EXIT_NOT_FOUND)


def _echo(found: list[SearchResult], *, as_array: bool) -> None:
    if as_array:
        click.echo(as_json(found))
    elif found:
        echo_table([("NAME", "FORMAT", "SIZE", "FITS", "DOWNLOADS", "LICENSE"), *map(_row, found)])
    else:
        click.echo("No model was found.\ntry: other words, or fewer", err=True)


def _row(find: SearchResult) -> tuple[object, ...]:
    size = format_bytes(find.size) if find.size else "-"
    downloads = "-" if find.downloads is None else f"{find.downloads:,}"
    return find.name, find.format, size, "yes" if find.fits else "no", downloads, find.license or "-"
