"""`ingle box`: use the models of your other machines as if they were on this one."""

import asyncio
import sys

import click
from click.shell_completion import CompletionItem

from app.commands.output import as_json, echo_table
from app.errors import InvalidSetting
from app.models.store import ModelStore
from app.settings.boxes import Box, forget_box, keep_box, read_boxes
from app.settings.settings import Settings, load_settings
from quant.errors import InglenookError

EXAMPLES = """\b
Examples:
  ingle box add gpu LINE        LINE is printed by ingle share on the other machine
  ingle box add gpu -           reads the line from stdin, so that it is not in the shell's history
  ingle run --model gpu/qwen3:32b "Why is the sky blue?"
  ingle box ls
"""


def _complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    try:
        names = list(read_boxes(load_settings().state_dir))
    except InglenookError:
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.group(epilog=EXAMPLES)
def box() -> None:
    """Use the models of your other machines.

    On the other machine, ingle share prints a line. With that line, its models are listed here as NAME/MODEL by ingle
    ls, in the chat, and in all APIs of the server, and requests for them are passed to it.
    """


@box.command()
@click.argument("name")
@click.argument("line")
def add(name: str, line: str) -> None:
    """Add the machine that printed LINE, under NAME. If LINE is -, it is read from stdin.

    Connects once, and prints the models of that machine. An earlier machine with this name is replaced.
    """
    settings = load_settings()
    given = Box.parse(name, sys.stdin.readline() if line == "-" else line)
    _check_name(given, settings)
    from app.client.boxes import models_of

    models = asyncio.run(models_of(given))
    keep_box(given, settings.state_dir)
    click.echo(f"{name} is added. Its models:" if models else f"{name} is added. It has no models.", err=True)
    for model in models:
        click.echo(model.name)


def _check_name(given: Box, settings: Settings) -> None:
    """Raise InvalidSetting if the names of models on this machine start like those of the box."""
    hidden = [model.name for model in ModelStore(settings).entries() if model.name.startswith(given.prefix)]
    if hidden:
        raise InvalidSetting(
            f"the model {hidden[0]} of this machine starts with {given.prefix}", "Choose another name."
        )


@box.command("ls")
@click.option("--json", "as_array", is_flag=True, help="Print a JSON array.")
def list_boxes(as_array: bool) -> None:
    """List your other machines and their models."""
    boxes = read_boxes(load_settings().state_dir)
    if not boxes:
        click.echo("[]" if as_array else "No machine is added.\ntry: ingle share on that machine", err=not as_array)
        return
    from app.client.boxes import models_of_all

    answers = asyncio.run(models_of_all(boxes.values()))
    if as_array:
        click.echo(as_json([_described(one, answers[one.name]) for one in boxes.values()]))
        return
    rows = [(one.name, one.url, _state(answers[one.name])) for one in boxes.values()]
    echo_table([("NAME", "ADDRESS", "STATE"), *rows])


def _described(one: Box, answer: object) -> dict[str, object]:
    known = {"name": one.name, "url": one.url, "fingerprint": one.fingerprint}
    if isinstance(answer, list):
        return {**known, "models": [model.name for model in answer]}
    return {**known, "problem": _state(answer)}


def _state(answer: object) -> str:
    if isinstance(answer, list):
        return ", ".join(model.name for model in answer) or "no models"
    return answer.message if isinstance(answer, InglenookError) else ""


@box.command()
@click.argument("name", shell_complete=_complete)
def rm(name: str) -> None:
    """Remove the machine NAME, with its key. On that machine, ingle share --off revokes the key."""
    if not forget_box(name, load_settings().state_dir):
        raise InvalidSetting(f"no machine is named {name}", "ingle box ls")
    click.echo(f"{name} is removed.", err=True)
