"""`ingle stop`: end running servers."""

import click

from app.errors import EXIT_NOT_FOUND, EXIT_OK
from app.process.instance import Instance, running_instances, stop_instance
from app.settings.settings import load_settings

EXAMPLES = """\b
Examples:
  ingle stop
  ingle stop 4645
  ingle stop --all
"""


@click.command(epilog=EXAMPLES)
@click.argument("port", type=int, required=False)
@click.option("--all", "everything", is_flag=True, help="Stop every server.")
def stop(port: int | None, everything: bool) -> int:
    """Stop a server, and wait until it is gone. Answers under way end early, and say so.

    PORT is needed when there are several. The exit status is 3 when there is none.
    """
    if everything and port is not None:
        raise click.UsageError("Give a port or --all, not both.")
    settings = load_settings()
    servers = running_instances(settings)
    chosen = [server for server in servers if port in (None, server.port)]
    if len(chosen) > 1 and not everything:
        raise click.UsageError(f"There are several: name a port ({_ports(servers)}) or use --all.")
    if not chosen:
        where = "" if port is None else f" on port {port}"
        click.echo(f"No server is running{where}." + (f" There is: {_ports(servers)}." if servers else ""), err=True)
        return EXIT_NOT_FOUND
    for server in chosen:
        stop_instance(server, settings)
        click.echo(f"Stopped {server.model} on port {server.port} (pid {server.pid}).", err=True)
    return EXIT_OK


def _ports(servers: list[Instance]) -> str:
    return ", ".join(str(server.port) for server in servers)
