"""`ingle connect` and `ingle disconnect`: settings of other programs that name this server, and their removal."""

import asyncio
import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from app.commands.options import model_option
from app.commands.output import as_json, echo_table
from app.commands.with_client import show
from app.connect.clients import CLIENTS, find_client
from app.connect.connection import Client, Connection, Setup
from app.errors import EXIT_NOT_FOUND, EXIT_OK, AppError, NoServer
from app.process.instance import running_instances
from app.settings.api_keys import own_key, own_key_file
from app.settings.places import Places, places_of
from app.settings.settings import Settings, child_environment, load_settings

if TYPE_CHECKING:
    from app.connect.undo import Undo

EXAMPLES = """\b
Examples:
  ingle connect
  ingle connect claude
  ingle connect codex --model qwen3:8b
  ingle connect opencode --project
  ingle connect zed --print
  ingle connect claude --check
"""
UNDO_EXAMPLES = """\b
Examples:
  ingle disconnect claude
  ingle disconnect zed --print
"""
_STATES: Mapping[bool | None, str] = {None: "not set up", True: "set up", False: "set up, changed since"}


class NotSetUp(AppError):
    """No settings of the client were written."""


def _client_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(client.name) for client in CLIENTS if client.name.startswith(incomplete)]


@click.command(epilog=EXAMPLES)
@click.argument("name", metavar="[CLIENT]", required=False, shell_complete=_client_names)
@model_option
@click.option("--print", "only_print", is_flag=True, help="Print what would be written, and write nothing.")
@click.option("--project", is_flag=True, help="Write the settings of the current folder instead of those of the user.")
@click.option("--check", is_flag=True, help="Run CLIENT with its settings, and check that the server answers it.")
@click.option("--json", "wants_json", is_flag=True, help="Print the list of programs as JSON.")
def connect(name: str | None, model: str | None, only_print: bool, project: bool, check: bool, wants_json: bool) -> int:
    """Write this server to the settings of CLIENT, until ingle disconnect.

    CLIENT is an agent, an editor, or another program, such as claude, codex, or zed. Only the values that it needs are
    written; comments and the order of its settings stay. For a program without such files, the command prints what to
    enter. Without CLIENT, it lists the installed programs and those that are set up.

    The model is chosen as by ingle with.
    """
    settings = load_settings(model=model)
    if name is None:
        _list(settings, wants_json)
        return EXIT_OK
    client = find_client(name)
    if project and not client.has_project_file:
        raise click.UsageError(f"{client.title} has no settings file for a folder.")
    places = places_of(child_environment(), own_key_file(settings), Path.cwd() if project else None)
    if check:
        return asyncio.run(_check(client, settings, places))
    _connect(client, settings, places, dry=only_print)
    return EXIT_OK


@click.command(epilog=UNDO_EXAMPLES)
@click.argument("name", metavar="CLIENT", shell_complete=_client_names)
@click.option("--print", "only_print", is_flag=True, help="Print what would be undone, and change nothing.")
def disconnect(name: str, only_print: bool) -> int:
    """Undo what ingle connect wrote to the settings of CLIENT.

    Values that have changed since are left as they are, and listed. Everything else in the files stays. The exit status
    is 3 if CLIENT is not set up.
    """
    client, settings = find_client(name), load_settings()
    undone = _undo(settings).disconnect(client.name, dry=only_print)
    for written in undone:
        done = "Would restore" if only_print else "Restored"
        click.echo(
            f"{done if written.after is not None else done.replace('estore', 'emove')} {written.path}.", err=True
        )
        for value in written.kept:
            click.echo(f"  Left {value}: it has changed since.", err=True)
    if not undone:
        click.echo(f"{client.title} is not set up.", err=True)
    return EXIT_OK if undone else EXIT_NOT_FOUND


def _connect(client: Client, settings: Settings, places: Places, *, dry: bool) -> None:
    from app.connect.model_choice import Candidate, shortcomings
    from app.connect.serving import lasting_connection

    connection, server = asyncio.run(lasting_connection(client, settings))
    if client.setup is None:
        for line in _steps(client, connection):
            click.echo(line)
        return
    setup = client.setup(connection, places)
    written = _undo(settings).connect(client.name, setup.targets, connection, dry=dry)
    if dry:
        _echo_values(setup, connection)
        return
    for file in written:
        click.echo(f"Wrote {file.path}.", err=True)
    for problem in shortcomings(client, Candidate(connection.model, connection.has_tools, connection.context_length)):
        click.echo(f"Note: {problem}.", err=True)
    for note in setup.notes:
        click.echo(note)
    if setup.arguments:
        click.echo(f"Run it with: {client.programs[0]} {' '.join(setup.arguments)}")
    if server is None:
        click.echo(f"Start the server with: {_start_command(connection)}", err=True)
    click.echo(f"Undo this with: ingle disconnect {client.name}", err=True)


async def _check(client: Client, settings: Settings, places: Places) -> int:
    """Check a client that is set up, and print what was found. Returns the exit status."""
    from app.connect.exchanges import check_requests
    from app.connect.launch import find_program
    from app.connect.probe import Probed, check_client

    connection = _undo(settings).connection(client.name)
    if connection is None or client.setup is None:
        raise NotSetUp(f"{client.title} is not set up", f"ingle connect {client.name}")
    server = next((one for one in running_instances(settings) if one.url == connection.base_url), None)
    if server is None:
        raise NoServer(f"no server is running at {connection.base_url}", _start_command(connection))
    key = own_key(settings)
    if not client.ask:
        return await show(check_requests(client, replace(connection, key=key), server, key))
    environment, setup = child_environment(), client.setup(connection, places)
    command = (find_program(client, environment), *setup.arguments, *client.ask)
    probed = Probed(client, connection, command, environment, connection.context_length)
    return await show(check_client(probed, server, key))


def _start_command(connection: Connection) -> str:
    model = shlex.quote(connection.file or connection.model)
    return f"ingle serve --model {model} --context {connection.context_length}"


def _steps(client: Client, connection: Connection) -> tuple[str, ...]:
    """Return what to do for a client without settings files."""
    if client.steps is not None:
        return client.steps(connection)
    assert client.launch is not None  # noqa: S101  # it then has variables
    variables = client.launch(connection, Path()).environment
    return (
        f"{client.title} has no settings file for a server. Add these lines to the profile of your shell:",
        *(f"export {name}={json.dumps(value)}" for name, value in variables.items()),
    )


def _echo_values(setup: Setup, connection: Connection) -> None:
    from app.connect.undo import shown

    for target in setup.targets:
        click.echo(f"{target.path}:")
        for path, value in target.values.items():
            text = value if target.format == "text" else f"{shown(path)} = {json.dumps(value, ensure_ascii=False)}"
            for line in str(text).replace(connection.key or "\0", "<key>").splitlines():
                click.echo(f"  {line}")


def _list(settings: Settings, wants_json: bool) -> None:
    """Print the installed clients and those that are set up."""
    import shutil

    undo, path = _undo(settings), child_environment().get("PATH")
    rows = []
    for client in CLIENTS:
        is_installed = any(shutil.which(program, path=path) for program in client.programs)
        state = undo.is_set_up(client.name)
        if is_installed or state is not None:
            rows.append({"name": client.name, "title": client.title, "state": _STATES[state]})
    if wants_json:
        click.echo(as_json(rows))
    elif rows:
        echo_table([("NAME", "PROGRAM", "STATE"), *(tuple(row.values()) for row in rows)])
    else:
        names = ", ".join(client.name for client in CLIENTS)
        click.echo(f"No known program is installed. Those that can be set up are {names}.", err=True)


def _undo(settings: Settings) -> "Undo":
    from app.connect.undo import Undo

    return Undo(settings.state_dir / "connect")
