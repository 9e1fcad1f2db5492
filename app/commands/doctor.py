"""`ingle doctor`: what is ready on this machine, and what to do about the rest."""

import click

from app.commands.output import as_json
from app.doctor.checks import examine
from app.doctor.finding import Finding
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
    """Check that this machine is ready, and say what to do if it is not.

    Exits with 1 if a check fails; a warning is no failure.
    """
    findings = []
    for finding in examine(load_settings(), progress_on_stderr(quiet=as_array)):
        findings.append(finding)
        if not as_array:
            _echo(finding)
    if as_array:
        click.echo(as_json(findings))
    if any(finding.status == "fail" for finding in findings):
        ctx.exit(EXIT_FAILURE)


def _echo(finding: Finding) -> None:
    click.echo(f"{finding.status:<5} {finding.name:<14} {finding.found}")
    if finding.remedy:
        click.echo(f"{'':<20} try: {finding.remedy}")
