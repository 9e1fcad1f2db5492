"""`ingle bench`: measure how fast a model runs. The figures go to stdout, progress to stderr."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from app.commands.options import context_option, gpu_options, kernels_option, model_option
from app.progress import Progress, progress_on_stderr
from app.settings.settings import Settings, load_settings
from app.text.terminal_text import sanitize

if TYPE_CHECKING:
    from app.bench.report import Report

EXAMPLES = """\b
Examples:
  ingle bench --prompt-tokens 128 --output-tokens 96                    decode at a context of 128 tokens
  ingle bench --prompt-tokens 60 --output-tokens 24 --concurrency 16    decode 16 streams at a context of 60
  ingle bench --suite --json | jq .decode_128
  ingle bench --http                                                    measure `ingle serve` over HTTP
  ingle bench --suite --record figures.json                             add the figures to a file
  ingle bench --plot figures.json --to charts                           draw the figures of a file as SVG
  ingle bench --tune --model q4_k_m.gguf                                find faster kernel tiles for this GPU
"""

_SIZES = ("prompt_tokens", "output_tokens", "concurrency")
_WORKLOADS = (*_SIZES, "repeat", "suite", "http", "record")
_FIGURES = Path(__file__).parents[2] / "docs/figures/speed.json"  # exists in a checkout only


@click.command(epilog=EXAMPLES)
@model_option
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Length of each prompt in tokens: the context at which decode is measured.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Length of each reply in tokens.",
)
@click.option(
    "--concurrency", type=click.IntRange(min=1), default=1, show_default=True, help="Streams that run at the same time."
)
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each workload.")
@click.option("--suite", is_flag=True, help="Run five common workloads instead of one.")
@click.option("--tune", is_flag=True, help="Find the fastest kernel tiles for this model and GPU, and save them.")
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Add the figures to this JSON file. They replace those of the same workloads, model, and machine.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    is_flag=False,
    flag_value=str(_FIGURES),
    metavar="[FILE]",
    help="Draw the figures of this JSON file as SVG files, and measure nothing. Default: the file of the charts in "
    "BENCHMARKS.md.",
)
@click.option(
    "--to",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder of the SVG files of --plot. Default: that of the JSON file.",
)
@click.option("--http", is_flag=True, help="Measure `ingle serve` over HTTP instead of the engine alone.")
@context_option
@click.option(
    "--threads",
    type=int,
    help="Threads of the CPU engine. Default: chosen by the engine; with --http, one per core.",
)
@gpu_options
@kernels_option
@click.option("--json", "as_object", is_flag=True, help="Print one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print no progress.")
def bench(
    prompt_tokens: int,
    output_tokens: int,
    concurrency: int,
    repeat: int,
    suite: bool,
    tune: bool,
    http: bool,
    record: Path | None,
    plot: Path | None,
    to: Path | None,
    as_object: bool,
    quiet: bool,
    **options: str | int | None,
) -> None:
    """Measure how fast a model generates tokens.

    Prompts consist of random tokens and are all different, so that no cache helps. Replies are greedy and have their
    full length. The prefill and decode rates are those of one stream. The rate of several streams is measured while all
    of them decode.
    """
    if plot is not None:
        _refuse((*_WORKLOADS, "tune"), "--plot measures nothing")
        _plot(plot, plot.parent if to is None else to)
        return
    _refuse(("to",), "--to works only with --plot")
    settings = load_settings(**options)
    if tune:
        _refuse(_WORKLOADS, "--tune runs no workload")
        _tune(settings, progress_on_stderr(quiet=quiet), as_object=as_object)
        return
    from app.bench.benchmark import Plan, benchmark
    from app.bench.recording import Recording
    from app.bench.workload import SUITE, rows_of

    if suite:
        _refuse(_SIZES, "--suite has fixed sizes")
    rows = SUITE if suite else rows_of(prompt_tokens, output_tokens, concurrency)
    plan = Plan(rows=rows, load=None if suite else rows[-1].load, repeat=repeat, http=http)
    recording = None if record is None else Recording(record, f"ingle {shlex.join(sys.argv[1:])}")
    if recording is not None:
        recording.check()
    report = benchmark(settings, plan, progress_on_stderr(quiet=quiet))
    _print(report, as_object=as_object)
    if recording is not None:
        recording.add(report)


def _plot(file: Path, folder: Path) -> None:
    from app.bench.chart import write_charts

    for path in write_charts(file, folder):
        click.echo(sanitize(str(path)))


def _tune(settings: Settings, progress: Progress, *, as_object: bool) -> None:
    from app.bench.tuning import tune
    from app.commands.output import as_json

    tuned = tune(settings, progress)
    if as_object:
        tiles = [{"product": shape, "tile": tile} for shape, tile in tuned.tiles.items()]
        click.echo(as_json({"card": tuned.card, "file": tuned.file, "faster": tuned.faster, "tiles": tiles}))
        return
    found = (
        f"{tuned.faster} of {len(tuned.tiles)} products are faster on {tuned.card} with tiles other than the default"
    )
    click.echo(sanitize(f"{found}. Saved in {tuned.file}"))


def _refuse(names: Sequence[str], reason: str) -> None:
    source = click.get_current_context().get_parameter_source
    for name in names:
        if source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"{reason}: remove --{name.replace('_', '-')}.")


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
