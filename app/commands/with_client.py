"""`ingle with`: run a program with this server's settings, for this one process."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from app.commands.options import context_option, model_option
from app.connect.clients import CLIENTS, find_client
from app.connect.connection import Client
from app.connect.launch import end_like, find_program, launcher, prepared, run_here
from app.errors import EXIT_FAILURE, EXIT_OK
from app.progress import Progress, progress_on_stderr
from app.settings.api_keys import own_key
from app.settings.settings import Settings, child_environment, load_settings

if TYPE_CHECKING:
    from app.connect.probe import Finding

EXAMPLES = """\b
Examples:
  ingle with claude
  ingle with codex --model qwen3:8b
  ingle with opencode -- run "Explain this folder."
  ingle with claude --check
  ingle with aider -- --message "Fix the tests." main.py
"""


def _client_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    names = [client.name for client in CLIENTS if client.launch is not None]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command("with", epilog=EXAMPLES)
@click.argument("name", metavar="CLIENT", shell_complete=_client_names)
@click.argument("arguments", metavar="[-- ARGUMENTS]", nargs=-1, type=click.UNPROCESSED)
@model_option
@context_option
@click.option(
    "--check", is_flag=True, help="Run CLIENT with test prompts, and check that the server gets and answers them."
)
@click.option("-q", "--quiet", is_flag=True, help="Print no progress.")
def with_client(
    name: str, arguments: tuple[str, ...], model: str | None, context: int | None, check: bool, quiet: bool
) -> int:
    """Run CLIENT with a model of this machine.

    CLIENT is an agent or another program, such as claude, codex, or opencode. It gets the address of the server and the
    name of the model for this one process; its own settings stay as they are. All ARGUMENTS are passed to it.

    A running server answers. If none runs, one starts in the background, and ends five minutes after CLIENT (setting
    keep_alive_s). Without --model, the loaded model is used if it can do the job, then the default model, then the
    largest stored model that fits.

    The exit status is that of CLIENT.
    """
    client, settings = find_client(name), load_settings(model=model, context=context)
    environment, progress = child_environment(), progress_on_stderr(quiet=quiet)
    if check and client.launch is None:
        return asyncio.run(_check_requests(client, settings, progress))
    launcher(client)  # raises before a server starts
    find_program(client, environment)
    if check:
        return asyncio.run(_check(client, settings, environment, progress))
    return end_like(asyncio.run(_run(client, settings, arguments, environment, progress)))


async def _run(
    client: Client, settings: Settings, arguments: Sequence[str], environment: Mapping[str, str], progress: Progress
) -> int:
    """Run a client with a server. Returns its exit status; negative: the signal that ended it."""
    from app.connect.serving import served

    async with served(client, settings, progress) as found:
        connection = found.connection
        progress.say(f"{client.title} uses {connection.model} with a context of {connection.context_length:,} tokens.")
        with prepared(client, connection, environment) as process:
            return run_here((*process.command, *arguments), process.environment)


async def _check(client: Client, settings: Settings, environment: Mapping[str, str], progress: Progress) -> int:
    """Check a client with a server, and print what was found. Returns the exit status."""
    from app.connect.probe import Probed, check_client
    from app.connect.serving import served

    async with served(client, settings, progress) as found:
        with prepared(client, found.connection, environment) as process:
            probed = Probed(client, found.connection, (*process.command, *client.ask), process.environment)
            return await show(check_client(probed, found.instance, own_key(settings)))


async def _check_requests(client: Client, settings: Settings, progress: Progress) -> int:
    """Check the requests of a client that cannot be run. Returns the exit status."""
    from app.connect.exchanges import check_requests
    from app.connect.serving import served

    async with served(client, settings, progress) as found:
        return await show(check_requests(client, found.connection, found.instance, own_key(settings)))


async def show(findings: "AsyncIterator[Finding]") -> int:
    """Print each finding of a check, with what to do about it. Returns the exit status."""
    status = EXIT_OK
    async for finding in findings:
        click.echo(f"{finding.status:<5} {finding.name:<8} {finding.found}")
        if finding.remedy:
            click.echo(f"{'':<14} try: {finding.remedy}")
        status = EXIT_FAILURE if finding.status == "fail" else status
    return status
