"""`ingle bench`: how fast a model runs here. The figures go to stdout, all narration to stderr."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from app.commands.options import gpu_options
from app.progress import Progress, progress_on_stderr
from app.settings.settings import Settings, load_settings
from app.text.terminal_text import sanitize

if TYPE_CHECKING:
    from app.bench.report import Report

EXAMPLES = """\b
Examples:
  ingle bench --prompt-tokens 128 --output-tokens 96                    decoding at a context of 128
  ingle bench --prompt-tokens 60 --output-tokens 24 --concurrency 16    16 streams at a context of 60
  ingle bench --suite --json | jq .decode_128
  ingle bench --http                                                    the same over HTTP, by `ingle serve`
  ingle bench --tune --model q4_k_m.gguf                                faster tiles for this GPU, kept for later
"""

_SIZES = ("prompt_tokens", "output_tokens", "concurrency")
_WORKLOADS = (*_SIZES, "repeat", "suite", "http")


@click.command(epilog=EXAMPLES)
@click.option("-m", "--model", help="A model of the catalog or of the Hub, or the path of a GGUF file or a folder.")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Length of each prompt: the context at which decoding is measured.",
)
@click.option(
    "--output-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Length of each reply."
)
@click.option(
    "--concurrency", type=click.IntRange(min=1), default=1, show_default=True, help="Streams that run together."
)
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each workload.")
@click.option("--suite", is_flag=True, help="Five common workloads instead of one.")
@click.option("--tune", is_flag=True, help="Find the fastest tiles of the GPU's kernels for this model, and keep them.")
@click.option("--http", is_flag=True, help="Measure `ingle serve` over HTTP instead of the engine.")
@click.option("--context", type=int, help="Longest prompt and reply together, in tokens.")
@click.option("--threads", type=int, help="Threads. Default: what the engine chooses; with --http, one a core.")
@gpu_options
@click.option("--kernels", help="Kernels: auto, cuda, cpu, or reference.")
@click.option("--json", "as_object", is_flag=True, help="Print one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no narration.")
def bench(
    prompt_tokens: int,
    output_tokens: int,
    concurrency: int,
    repeat: int,
    suite: bool,
    tune: bool,
    http: bool,
    as_object: bool,
    quiet: bool,
    **chosen: str | int | None,
) -> None:
    """Measure how fast a model generates tokens.

    Prompts are random tokens, no two alike, so that no cache can help; replies are greedy and have their full length.
    Prefill and decode are of one stream; what several streams decode is counted while all of them do.
    """
    settings = load_settings(**chosen)
    if tune:
        _refuse(_WORKLOADS, "--tune runs no workload")
        _tune(settings, progress_on_stderr(quiet=quiet), as_object=as_object)
        return
    from app.bench.benchmark import Plan, benchmark
    from app.bench.workload import SUITE, rows_of

    if suite:
        _refuse(_SIZES, "--suite has sizes of its own")
    rows = SUITE if suite else rows_of(prompt_tokens, output_tokens, concurrency)
    plan = Plan(rows=rows, load=None if suite else rows[-1].load, repeat=repeat, http=http)
    _print(benchmark(settings, plan, progress_on_stderr(quiet=quiet)), as_object=as_object)


def _tune(settings: Settings, progress: Progress, *, as_object: bool) -> None:
    from app.bench.tuning import tune
    from app.commands.output import as_json

    tuned = tune(settings, progress)
    if as_object:
        tiles = [{"product": shape, "tile": tile} for shape, tile in tuned.tiles.items()]
        click.echo(as_json({"card": tuned.card, "file": tuned.file, "faster": tuned.faster, "tiles": tiles}))
        return
    found = f"Of {len(tuned.tiles)} products, {tuned.faster} are faster in other tiles than the usual ones"
    click.echo(sanitize(f"{found} on {tuned.card}. Kept in {tuned.file}"))


def _refuse(names: Sequence[str], reason: str) -> None:
    source = click.get_current_context().get_parameter_source
    for name in names:
        if source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"{reason}: leave --{name.replace('_', '-')} out.")


def _print(report: "Report", *, as_object: bool) -> None:
    from app.bench.table import conditions, table
    from app.commands.output import as_json, echo_table

    if as_object:
        click.echo(as_json(report.json()))
        return
    echo_table(table(report))
    click.echo()
    for line in conditions(report):
        click.echo(sanitize(line))
