"""`ingle unload`: unload models of the running servers."""

import asyncio
from collections.abc import Sequence

import click

from app.client.running_server import servers_of_all
from app.commands.options import server_port_option, stored_names
from app.errors import EXIT_NOT_FOUND, EXIT_OK, ModelNotFound
from app.process.instance import Instance
from app.settings.api_keys import own_key
from app.settings.settings import load_settings

EXAMPLES = """\b
Examples:
  ingle unload qwen3:8b
  ingle unload --all
"""


@click.command(epilog=EXAMPLES)
@click.argument("name", required=False, shell_complete=stored_names)
@click.option("--all", "everything", is_flag=True, help="Unload every model.")
@server_port_option
def unload(name: str | None, everything: bool, port: int | None) -> int:
    """Unload the model NAME, and free its memory. Its running requests end first.

    The next request that names the model loads it again. The exit status is 3 if no server has loaded it.
    """
    if everything == (name is not None):
        raise click.UsageError("Give the name of a model, or --all.")
    settings = load_settings(port=port)
    unloaded = asyncio.run(_unload(servers_of_all(settings), own_key(settings), name))
    for model in unloaded:
        click.echo(f"Unloaded {model}.", err=True)
    if not unloaded:
        click.echo(f"No server has loaded {name or 'a model'}.", err=True)
    return EXIT_OK if unloaded else EXIT_NOT_FOUND


async def _unload(servers: Sequence[Instance], key: str | None, name: str | None) -> list[str]:
    """Unload a model, or all models, in each server. Returns the names of those that were loaded."""
    from app.client.own_server import Client

    unloaded: list[str] = []
    problem: ModelNotFound | None = None
    for server in servers:
        async with Client(server, key) as client:
            try:
                unloaded += await client.unload(name)
            except ModelNotFound as missing:  # another server may have it
                problem = missing
    if problem is not None and not unloaded:
        raise problem
    return unloaded
