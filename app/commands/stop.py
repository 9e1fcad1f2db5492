"""`ingle stop`: stop running servers."""

import click

from app.errors import EXIT_NOT_FOUND, EXIT_OK
from app.process.instance import Instance, running_instances, stop_instance
from app.settings.settings import load_settings

EXAMPLES = """\b
Examples:
  ingle stop
  ingle stop 4645
  ingle stop 98213
  ingle stop --all
"""


@click.command(epilog=EXAMPLES)
@click.argument("port", type=int, required=False, metavar="[PORT or PID]")
@click.option("--all", "everything", is_flag=True, help="Stop every server.")
def stop(port: int | None, everything: bool) -> int:
    """Stop a server, and wait until its process has ended. Running replies end early, with an error.

    The port or the process id is needed if several servers run; `ingle ps` lists both. The exit status is 3 if no
    server runs.
    """
    if everything and port is not None:
        raise click.UsageError("A port and --all cannot be combined.")
    settings = load_settings()
    servers = running_instances(settings)
    chosen = [server for server in servers if port in (None, server.port, server.pid)]
    if len(chosen) > 1 and not everything:
        raise click.UsageError(f"{len(chosen)} servers are running: give a port ({_ports(servers)}) or --all.")
    if not chosen:
        where = "" if port is None else f" with port or pid {port}"
        others = f" Servers are running on: {_ports(servers)}." if servers else ""
        click.echo(f"No server is running{where}.{others}", err=True)
        return EXIT_NOT_FOUND
    for server in chosen:
        stop_instance(server, settings)
        click.echo(f"Stopped {server.title} on port {server.port} (pid {server.pid}).", err=True)
    return EXIT_OK


def _ports(servers: list[Instance]) -> str:
    return ", ".join(str(server.port) for server in servers)
