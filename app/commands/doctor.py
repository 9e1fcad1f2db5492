"""`ingle doctor`: check this machine, and print a remedy for each problem, or write an archive for a bug report."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click

from app.commands.output import as_json
from app.doctor.check_result import CheckResult
from app.doctor.checks import run_checks
from app.errors import EXIT_FAILURE
from app.progress import format_bytes, progress_on_stderr
from app.settings.settings import Settings, load_settings

EXAMPLES = """\b
Examples:
  ingle doctor
  ingle doctor --json | jq '.[] | select(.status != "ok")'
  ingle doctor --bundle
"""


@click.command(epilog=EXAMPLES)
@click.option("--json", "as_array", is_flag=True, help="Print a JSON array.")
@click.option(
    "--bundle",
    metavar="[FILE]",
    is_flag=False,
    flag_value="",
    help="Write an archive for a bug report: the results, versions, settings, names of models, and the log, without "
    "keys, names, and chats. Default: a new file in this folder.",
)
@click.pass_context
def doctor(ctx: click.Context, as_array: bool, bundle: str | None) -> None:
    """Check that this machine is ready, and print a remedy for each problem.

    The exit status is 1 if a check fails, and 0 if there are only warnings.
    """
    results = []
    settings = load_settings()
    for result in run_checks(settings, progress_on_stderr(quiet=as_array)):
        results.append(result)
        if not as_array:
            _echo(result)
    if as_array:
        click.echo(as_json(results))
    if bundle is not None:
        _write_bundle(Path(bundle or f"ingle-{datetime.now():%Y%m%d-%H%M%S}.zip"), settings, results)
    if any(result.status == "fail" for result in results):
        ctx.exit(EXIT_FAILURE)


def _echo(result: CheckResult) -> None:
    click.echo(f"{result.status:<5} {result.name:<14} {result.found}")
    if result.remedy:
        click.echo(f"{'':<20} try: {result.remedy}")


def _write_bundle(path: Path, settings: Settings, results: Sequence[CheckResult]) -> None:
    from app.doctor.bundle import bundled_files, write_bundle

    files = bundled_files(settings, results)
    write_bundle(path, files)
    click.echo(f"\n{path.absolute()} contains, without keys, names, and chats:", err=True)
    for file in files:
        click.echo(f"  {file.name:<14} {file.meaning} ({format_bytes(len(file.content))})", err=True)
    click.echo("Read it before you attach it to a report.", err=True)
