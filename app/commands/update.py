"""`ingle update`: tell how to update this installation, and with --check whether a newer version exists."""

import click

from app.commands.output import as_json
from app.doctor.installation import check_for_update, installed_version, update_command
from app.errors import EXIT_OK, EXIT_UPDATE
from app.settings.settings import load_settings

EXAMPLES = """\b
Examples:
  ingle update
  ingle update --check
  ingle update --check --json | jq -r .latest
"""


@click.command(epilog=EXAMPLES)
@click.option("--check", is_flag=True, help="Ask the package index for the newest version.")
@click.option("--json", "as_object", is_flag=True, help="Print a JSON object.")
def update(check: bool, as_object: bool) -> int:
    """Show the command that updates this installation. Nothing is changed.

    Only --check connects to the package index (setting package_index). The exit status is then 0 if this version is the
    newest, 10 if a newer one exists, and 5 if the index cannot be reached.
    """
    if not check:
        installed, command = installed_version(), update_command()
        version = f"inglenook {installed}" if installed else "inglenook, run from a checkout"
        click.echo(as_json({"installed": installed, "command": command}) if as_object else f"{version}\n{command}")
        return EXIT_OK
    found = check_for_update(load_settings())
    if as_object:
        click.echo(as_json(found))
    elif found.is_newer:
        click.echo(f"inglenook {found.latest} is available; {found.installed} is installed.\n{found.command}")
    else:
        state = f"inglenook {found.installed} is the newest version" if found.installed else "this is a checkout"
        click.echo(f"{state} ({found.index} has {found.latest}).")
    return EXIT_UPDATE if found.is_newer else EXIT_OK
