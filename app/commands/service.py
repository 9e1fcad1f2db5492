"""`ingle service`: a server that the system starts, as a service of this user."""

from collections.abc import Sequence

import click

from app.commands.output import as_json, echo_table
from app.errors import EXIT_NOT_FOUND, EXIT_OK, InvalidSetting
from app.service.manager import manager_of
from app.service.plan import ServiceStatus
from app.settings.settings import SETTINGS, Settings, config_file, load_settings

EXAMPLES = """\b
Examples:
  ingle service install
  ingle service install --print
  ingle service status
  ingle service remove
"""
_ADDRESS_SETTINGS = ("host", "port", "ollama_port")


@click.group(epilog=EXAMPLES)
def service() -> None:
    """Install a server that the system starts, as a service of your account.

    On Linux (systemd) and macOS (launchd), the system listens on the port, and the first request starts the server,
    which ends 30 minutes after the last one (setting idle_exit). On Windows, a task starts the server at logon. The
    server takes its settings from config.toml.
    """


@service.command()
@click.option("--print", "print_only", is_flag=True, help="Print the files of the service, and install nothing.")
def install(print_only: bool) -> None:
    """Install the service, or replace it.

    Run it again after you have changed the host or a port in config.toml.
    """
    settings = load_settings()
    _check_origins(settings)
    manager = manager_of(settings)
    if print_only:
        for file in manager.files():
            click.echo(f"# {file.path}\n{file.content}")
        return
    manager.install()
    click.echo(f"The service is installed ({manager.title}).", err=True)
    for line in manager.after_install:
        click.echo(line, err=True)


@service.command()
def remove() -> int:
    """Stop the service, and remove it with its files.

    The exit status is 3 if no service is installed.
    """
    manager = manager_of(load_settings())
    if not manager.is_installed():
        click.echo("No service is installed.", err=True)
        return EXIT_NOT_FOUND
    manager.remove()
    click.echo("The service is removed.", err=True)
    return EXIT_OK


@service.command()
@click.option("--json", "as_object", is_flag=True, help="Print a JSON object.")
def status(as_object: bool) -> int:
    """Show whether the service is installed and active, how it ended the last time, and where its logs are.

    The exit status is 3 if no service is installed.
    """
    settings = load_settings()
    found = manager_of(settings).status()
    if as_object:
        click.echo(as_json(found))
    elif found.installed:
        echo_table(_rows(found))
        _warn_of_ports(found, settings)
    else:
        click.echo(f"No service is installed ({found.manager}).\ntry: ingle service install", err=True)
    return EXIT_OK if found.installed else EXIT_NOT_FOUND


def _rows(found: ServiceStatus) -> Sequence[tuple[str, str]]:
    rows = [
        ("service", f"installed ({found.manager})"),
        ("server", f"{found.state}, pid {found.pid}" if found.pid else found.state),
        ("socket", f"{found.socket} on {', '.join(found.addresses)}" if found.socket else "-"),
        ("last exit", found.last_exit or "-"),
        ("logs", "; ".join(("ingle logs", *filter(None, [found.logs])))),
    ]
    return [*rows, *(("file", str(path)) for path in found.files)]


def _warn_of_ports(found: ServiceStatus, settings: Settings) -> None:
    """Warn if the system listens on another port than the settings name."""
    ports = {address.rpartition(":")[2] for address in found.addresses}
    if ports and str(settings.port) not in ports:
        click.echo(
            f"The settings have port {settings.port}, and the service listens on {', '.join(sorted(ports))}.\n"
            "try: ingle service install",
            err=True,
        )


def _check_origins(settings: Settings) -> None:
    """Warn of settings that the service does not see.

    Raises InvalidSetting if the address comes from the environment: the service would listen on another one.
    """
    for name in SETTINGS:
        origin = settings.origins[name]
        if origin in ("default", str(config_file())):
            continue
        problem = f"{origin} is set in this environment, and the service does not see it"
        remedy = f"ingle config set {name} VALUE"
        if name in _ADDRESS_SETTINGS:
            raise InvalidSetting(problem, remedy)
        click.echo(f"{problem}.\ntry: {remedy}", err=True)
