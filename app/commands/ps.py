"""`ingle ps`: list the running servers and their models."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from app.commands.output import as_json, echo_table, echo_wide_table
from app.errors import AppError
from app.models.residency.ledger import Bytes
from app.process.instance import Instance, running_instances
from app.settings.api_keys import own_key
from app.settings.settings import load_settings
from app.text.terminal_text import sanitize
from tui.figures import share, size, size_of, time_left

if TYPE_CHECKING:
    from app.client.own_server import ActiveRequest, ServerModel

EXAMPLES = """\b
Examples:
  ingle ps
  ingle ps --json | jq -r '.[].api_url'
  ingle ps --json | jq -r '.[].models[] | select(.state == "loaded") | .name'
  ingle ps --json | jq '.[].waiting_by_class.background'
"""

# Fields of a server's health report, under the names that the server gives them.
_FIGURES = ("running", "waiting", "running_by_class", "waiting_by_class", "kv_blocks", "kv_blocks_held")


@click.command(epilog=EXAMPLES)
@click.option("--json", "as_array", is_flag=True, help="Print a JSON array.")
def ps(as_array: bool) -> None:
    """List the running servers, and the models that they have loaded.

    KIND is "server" for `ingle serve`, and "chat" for the engine of chats and of `ingle run`, which exits when it is
    not used.

    For each server: its models with their memory, its requests by service class, the share of its KV cache that they
    hold, and the progress of prompts in prefill.
    """
    settings = load_settings()
    servers = asyncio.run(_ask_all(running_instances(settings), own_key(settings)))
    if as_array:
        click.echo(as_json(servers))
    elif servers:
        echo_wide_table([("PID", "KIND", "MODEL", "STATUS", "SINCE", "URL"), *map(_server_row, servers)])
        if models := [_model_row(server["pid"], one) for server in servers for one in server["models"]]:
            click.echo()
            echo_wide_table([("PID", "MODEL", "REQUESTS", "WEIGHTS", "KV CACHE", "KEPT", "STATE"), *models])
        click.echo()
        echo_table([("PID", "RUNNING BY CLASS", "WAITING BY CLASS", "KV BLOCKS HELD"), *map(_details, servers)])
        if prompts := [_prompt(server["pid"], one) for server in servers for one in server["reading"]]:
            click.echo()
            echo_table([("PID", "PROMPT OF", "READ", "OF"), *prompts])
    else:
        click.echo("No server is running.\ntry: ingle serve", err=True)


def _server_row(server: Mapping[str, Any]) -> tuple[object, ...]:
    since = datetime.fromisoformat(server["started_at"]).astimezone()
    names = server["pid"], server["kind"], server["title"]
    return *names, server["status"], f"{since:%Y-%m-%d %H:%M}", server["api_url"]


def _model_row(pid: int, model: Mapping[str, Any]) -> tuple[object, ...]:
    memory = [Bytes(**one) for one in model["memory"].values()]
    cache, touched = sum(one.cache for one in memory), sum(one.touched for one in memory)
    weights = size(sum(one.weights for one in memory)) if memory else "-"
    seconds = model["expires_in"]
    kept = "pinned" if model["pinned"] else "-" if seconds is None else time_left(seconds)
    requests = _listed(model["requests"])
    return pid, model["name"], requests, weights, size_of(touched, cache) if cache else "-", kept, _state(model)


def _state(model: Mapping[str, Any]) -> str:
    """Describe the state of a model on one line: "loading 43 %: Loading the weights", "failed: out of memory"."""
    done = "" if model["progress"] is None else f" {share(model['progress'])}"
    reason = sanitize(model["problem"] or model["stage"] or "")
    return f"{model['state']}{done}{f': {reason}' if reason else ''}"


def _details(server: Mapping[str, Any]) -> tuple[object, ...]:
    classes = (_listed(server["running_by_class"]), _listed(server["waiting_by_class"]))
    held, blocks = server["kv_blocks_held"], server["kv_blocks"]
    return server["pid"], *classes, f"{held} of {blocks} ({share(held / blocks)})" if blocks else "-"


def _prompt(pid: int, reading: Mapping[str, Any]) -> tuple[object, ...]:
    done, total = reading["done"], reading["total"]
    return pid, sanitize(reading["client"]) or "-", f"{done:,} ({share(done / total)})", f"{total:,} tokens"


def _listed(requests: Mapping[str, int] | None) -> str:
    return ", ".join(f"{count} {name}" for name, count in (requests or {}).items() if count) or "-"


async def _ask_all(instances: list[Instance], key: str | None) -> list[dict[str, Any]]:
    return await asyncio.gather(*(_ask(instance, key) for instance in instances))


async def _ask(instance: Instance, key: str | None) -> dict[str, Any]:
    """Return the record of a server with its health report, or with the error as its status."""
    from app.client.own_server import Client

    named = {"title": instance.title, "api_url": instance.api_url}
    server = {**asdict(instance), **named, **dict.fromkeys(_FIGURES), "models": [], "reading": []}
    try:
        async with Client(instance, key) as client:
            health = asdict(await client.health())
            requests = await client.requests()
            models = await client.models() if instance.serves_all else []
    except AppError as problem:
        return server | {"status": problem.message}
    return {
        **server,
        "status": health.pop("problem") or "ok",
        **health,
        "models": [_model(one, requests) for one in models if one.is_in_use],
        "reading": [_prefill(one) for one in requests if one.phase == "reading"],
    }


def _model(model: "ServerModel", requests: "Sequence[ActiveRequest]") -> dict[str, Any]:
    """Return the state of a model, with its requests by phase."""
    import msgspec

    phases = Counter(one.phase for one in requests if one.model in model.names)
    return {**msgspec.to_builtins(model), "requests": dict(phases)}


def _prefill(request: "ActiveRequest") -> dict[str, Any]:
    return {"model": request.model, "client": request.client, "done": request.done, "total": request.total}
