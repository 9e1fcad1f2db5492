"""`ingle load`: load a model in a running server."""

import asyncio

import click

from app.client.running_server import servers_or_service
from app.commands.options import read_by, server_port_option, stored_names
from app.process.instance import Instance
from app.progress import Progress, progress_on_stderr
from app.settings.api_keys import own_key
from app.settings.settings import load_settings
from app.settings.values import duration

EXAMPLES = """\b
Examples:
  ingle load qwen3:8b
  ingle load qwen3:8b --pin
  ingle load all-minilm --ttl 30m
"""


@click.command(epilog=EXAMPLES)
@click.argument("name", shell_complete=stored_names)
@click.option(
    "--pin/--no-pin",
    default=None,
    help="Keep the model loaded, even if another model needs its memory. Default: unchanged, at first --no-pin.",
)
@click.option(
    "--ttl",
    metavar="TIME",
    callback=read_by(duration),
    help="Time without requests after which the model is unloaded: 90s, 30m, or 2h. Default: when memory is needed.",
)
@server_port_option
@click.option("-q", "--quiet", is_flag=True, help="Print no progress.")
def load(name: str, pin: bool | None, ttl: float | None, port: int | None, quiet: bool) -> None:
    """Load the stored model NAME in a running server, so that its next request need not wait.

    An installed service starts if no server runs. If the memory is not sufficient, the server unloads models that no
    request uses. Ctrl-C stops the load.
    """
    settings = load_settings(port=port)
    progress = progress_on_stderr(quiet=quiet)
    server, *_ = asyncio.run(servers_or_service(settings))
    seconds = asyncio.run(_load(server, own_key(settings), name, pin, ttl, progress))
    progress.say(f"{name} is loaded{f' ({seconds:.1f} s)' if seconds else ''} in the server on port {server.port}.")


async def _load(
    server: Instance, key: str | None, name: str, pin: bool | None, ttl: float | None, progress: Progress
) -> float:
    from app.client.own_server import Client

    async with Client(server, key) as client:
        return await client.load_with_progress(name, progress, pinned=pin, keep_alive=ttl)
