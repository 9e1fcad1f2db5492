"""`ingle doctor`: check this machine, and print a remedy for each problem."""

import click

from app.commands.output import as_json
from app.doctor.check_result import CheckResult
from app.doctor.checks import run_checks
from app.errors import EXIT_FAILURE
from app.progress import progress_on_stderr
from app.settings.settings import load_settings

EXAMPLES = """\b
Examples:
  ingle doctor
  ingle doctor --json | jq '.[] | select(.status != "ok")'
"""


@click.command(epilog=EXAMPLES)
@click.option("--json", "as_array", is_flag=True, help="Print a JSON array.")
@click.pass_context
def doctor(ctx: click.Context, as_array: bool) -> None:
    """Check that this machine is ready, and print a remedy for each problem.

    The exit status is 1 if a check fails, and 0 if there are only warnings.
    """
    results = []
    for result in run_checks(load_settings(), progress_on_stderr(quiet=as_array)):
        results.append(result)
        if not as_array:
            _echo(result)
    if as_array:
        click.echo(as_json(results))
    if any(result.status == "fail" for result in results):
        ctx.exit(EXIT_FAILURE)


def _echo(result: CheckResult) -> None:
    click.echo(f"{result.status:<5} {result.name:<14} {result.found}")
    if result.remedy:
        click.echo(f"{'':<20} try: {result.remedy}")
