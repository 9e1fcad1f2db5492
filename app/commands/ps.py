"""`ingle ps`: the running servers."""

import asyncio
from dataclasses import asdict
from typing import Any

import click

from app.commands.listing import as_json, echo_table
from app.config import load_settings
from app.errors import AppError
from app.instance import Instance, running_instances

EXAMPLES = """\b
Examples:
  ingle ps
  ingle ps --json | jq -r '.[].api_url'
"""


@click.command(epilog=EXAMPLES)
@click.option("--json", "as_array", is_flag=True, help="Print a JSON array.")
def ps(as_array: bool) -> None:
    """List the running servers, and how many requests each is working on."""
    servers = asyncio.run(_ask_all(running_instances(load_settings())))
    if as_array:
        click.echo(as_json(servers))
    elif servers:
        columns = ("pid", "model", "api_url", "status", "running", "waiting", "started_at")
        rows = [["-" if server[column] is None else server[column] for column in columns] for server in servers]
        echo_table([("PID", "MODEL", "URL", "STATUS", "RUNNING", "WAITING", "SINCE"), *rows])
    else:
        click.echo("No server is running.\ntry: ingle serve", err=True)


async def _ask_all(instances: list[Instance]) -> list[dict[str, Any]]:
    return await asyncio.gather(*(_ask(instance) for instance in instances))


async def _ask(instance: Instance) -> dict[str, Any]:
    """The record of a server, and what it says of itself, if it says anything."""
    from app.http_client import Client

    server = {**asdict(instance), "api_url": instance.api_url, "status": "ok", "running": None, "waiting": None}
    try:
        async with Client(instance) as client:
            health = await client.health()
    except AppError as problem:
        return server | {"status": problem.message}
    return server | {"status": health.problem or "ok", "running": health.running, "waiting": health.waiting}
