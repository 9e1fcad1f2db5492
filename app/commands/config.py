"""`ingle config`: the settings, where each comes from, and config.toml."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from app.commands.output import as_json, echo_table
from app.settings.config_file import remove_setting, write_setting
from app.settings.settings import (
    SECRETS,
    SETTINGS,
    Settings,
    config_file,
    current_name,
    load_settings,
    setting_named,
)
from engine.config import MemoryLimit

EXAMPLES = """\b
Examples:
  ingle config list
  ingle config set model qwen3:4b
  ingle config set context 32768
  ingle config get models_dir
  ingle config unset context
"""


def _complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    found = (name for name in SETTINGS if name.startswith(incomplete))
    return [CompletionItem(name, help=SETTINGS[name].meaning) for name in found]


@click.group(epilog=EXAMPLES)
def config() -> None:
    """Show and change settings.

    A flag of a command comes before an INGLE_* variable, that before config.toml, and that before the default. Every
    setting has such a variable: INGLE_ and its name in capitals.
    """


@config.command("list")
@click.option("--json", "as_array", is_flag=True, help="Print a JSON array.")
def list_settings(as_array: bool) -> None:
    """List all settings: what each is, and where that comes from. What is secret is not shown."""
    settings = load_settings()
    if as_array:
        click.echo(as_json([_described(name, settings) for name in SETTINGS]))
        return
    rows = [(name, _words(name, settings), settings.origins[name]) for name in SETTINGS]
    echo_table([("SETTING", "VALUE", "FROM"), *rows])


@config.command()
@click.argument("name", shell_complete=_complete)
@click.option("--json", "as_object", is_flag=True, help="Print a JSON object.")
def get(name: str, as_object: bool) -> None:
    """Print the value of the setting NAME."""
    setting_named(name)
    name = current_name(name)
    settings = load_settings()
    click.echo(as_json(_described(name, settings)) if as_object else _words(name, settings))


@config.command("set")
@click.argument("name", shell_complete=_complete)
@click.argument("value")
def set_value(name: str, value: str) -> None:
    """Write into config.toml that the setting NAME is VALUE. A list has commas: a,b. With -, VALUE is read from stdin,
    as suits a key."""
    path = write_setting(name, sys.stdin.read().strip() if value == "-" else value)
    click.echo(f"{name} is set in {path}.", err=True)
    _warn_of_variables(name)


@config.command()
@click.argument("name", shell_complete=_complete)
def unset(name: str) -> None:
    """Take the setting NAME out of config.toml."""
    path = remove_setting(name)
    click.echo(f"{name} is not set in {path or config_file()}{' any more' if path else ''}.", err=True)
    _warn_of_variables(name)


@config.command()
def path() -> None:
    """Print the path of config.toml, which need not exist."""
    click.echo(config_file())


def _warn_of_variables(name: str) -> None:
    """Where the file is not what counts."""
    name = current_name(name)
    if name not in SETTINGS:
        return
    origin = load_settings().origins[name]
    if origin not in ("default", str(config_file())):
        click.echo(f"{origin} is set, and comes first: {name} stays what it says.", err=True)


def _described(name: str, settings: Settings) -> dict[str, object]:
    value = None if name in SECRETS else _plain(settings, name)
    setting, origin = SETTINGS[name], settings.origins[name]
    variable = f"INGLE_{name.upper()}"
    return {"name": name, "value": value, "origin": origin, "variable": variable, "meaning": setting.meaning}


def _words(name: str, settings: Settings) -> str:
    value = _plain(settings, name)
    match value:
        case _ if name in SECRETS:
            return "(secret)" if value else "-"
        case bool():
            return "yes" if value else "no"
        case list():
            return ",".join(map(str, value)) or "-"
        case dict():
            return ",".join(f"{key}={meaning}" for key, meaning in value.items()) or "-"
        case None:
            return "auto" if _means_auto(name) else "-"
    return str(value)


def _means_auto(name: str) -> bool:
    """Whether no value stands for one that is chosen."""
    try:
        return SETTINGS[name].parse("auto") is None
    except ValueError:
        return False


def _plain(settings: Settings, name: str) -> object:
    """A value as JSON has it."""
    value = vars(settings)[name]
    match value:
        case MemoryLimit():
            return _memory(value)
        case Path():
            return os.fspath(value)
        case tuple():
            return list(value)
        case Mapping():
            return dict(value)
    return value


def _memory(limit: MemoryLimit) -> str:
    if limit.share:
        return f"{100 * limit.share:g}%"
    return f"{limit.num_bytes / 1e9:g}GB" if limit.num_bytes else "auto"
