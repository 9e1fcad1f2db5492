"""Compare the token rates of Inglenook and llama.cpp on this machine.

    python -m tests.bench.compare --suite --xllamacpp
    python -m tests.bench.compare --suite --llama-server llama.cpp/build/bin/llama-server --threads 2 [--http]
    python -m tests.bench.compare --suite --ik-llama ik_llama.cpp/build/bin --threads 2
    python -m tests.bench.compare --prompt-tokens 128 --output-tokens 96 --xllamacpp --json | jq '.compare[0].ratios'

    python -m tests.bench.compare --suite --xllamacpp --record figures.json && ingle bench --plot figures.json

Every round measures all programs in turn, with the same file, threads, and sizes. --xllamacpp measures llama.cpp in the
package xllamacpp. --llama-server measures a build of llama.cpp, found by the path of its llama-server, and --ik-llama
one of ik_llama.cpp. The results go to stdout, the progress to stderr. --record adds them to a file of figures, which
`ingle bench --plot` draws. `ingle bench` measures only Inglenook.
"""

import argparse
import shlex
import sys
from pathlib import Path

import click

from app.bench.benchmark import Plan
from app.bench.recording import Recording
from app.bench.workload import SUITE, rows_of
from app.commands.output import as_json, echo_table
from app.errors import exit_status
from app.progress import progress_on_stderr
from app.settings.settings import load_settings
from quant.errors import InglenookError
from tests.bench.peers.comparison import Comparison, compare
from tests.bench.peers.competitors import find_peers


def main() -> int:
    arguments = _parser().parse_args()
    chosen = {name: getattr(arguments, name) for name in ("model", "context", "threads", "kernels", "device")}
    try:
        progress = progress_on_stderr(quiet=arguments.quiet)
        peers = find_peers(arguments.xllamacpp, arguments.llama_server, progress, arguments.ik_llama)
        rows = (
            SUITE
            if arguments.suite
            else rows_of(arguments.prompt_tokens, arguments.output_tokens, arguments.concurrency)
        )
        load = None if arguments.suite else rows[-1].load
        plan = Plan(rows=rows, load=load, repeat=arguments.repeat, http=arguments.http)
        recording = _recording(arguments)
        if recording is not None:
            recording.check()
        comparison = compare(load_settings(**chosen), plan, peers, progress)
        _print(comparison, as_object=arguments.json)
        if recording is not None:
            recording.add(comparison.report, [peer.result for peer in comparison.peers])
    except InglenookError as problem:
        remedy = f"\ntry: {problem.remedy}" if problem.remedy else ""
        print(f"error: {problem.message}{remedy}", file=sys.stderr)
        return exit_status(problem)
    except KeyboardInterrupt:
        return 130
    return 0


def _recording(arguments: argparse.Namespace) -> Recording | None:
    if arguments.record is None:
        return None
    command = f"python -m tests.bench.compare {shlex.join(sys.argv[1:])}"
    return Recording(arguments.record, command, arguments.title, arguments.chart)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xllamacpp", action="store_true")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--ik-llama", type=Path, help="folder of the programs of ik_llama.cpp, without --http")
    parser.add_argument("--http", action="store_true", help="compare servers over HTTP instead of engines")
    parser.add_argument("--suite", action="store_true", help="measure five common workloads instead of one")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5, help="number of rounds (default: 5)")
    parser.add_argument("-m", "--model")
    parser.add_argument("--context", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kernels")
    parser.add_argument("--device")
    parser.add_argument("--record", type=Path, help="add the figures to this file, or replace those of the same key")
    parser.add_argument("--title", help="title of the model in the chart of --record")
    parser.add_argument("--chart", help="name of the chart of --record; entries with one name are drawn together")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-q", "--quiet", action="store_true")
    return parser


def _print(comparison: Comparison, *, as_object: bool) -> None:
    if as_object:
        click.echo(as_json(comparison.json()))
        return
    echo_table(comparison.table())
    click.echo()
    for line in comparison.conditions():
        click.echo(line)


if __name__ == "__main__":
    sys.exit(main())
