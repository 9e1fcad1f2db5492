"""`ingle config`: show the settings and the origin of each, and edit config.toml."""

import sys

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
from app.settings.values import plain

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

    The order of precedence is: option of a command, environment variable, config.toml, default. The variable of a
    setting is INGLE_ and its name in capitals: INGLE_CONTEXT sets context.
    """


@config.command("list")
@click.option("--json", "as_array", is_flag=True, help="Print a JSON array.")
def list_settings(as_array: bool) -> None:
    """List all settings with their values and origins. Secret values are not shown.

    --json adds what each setting means.
    """
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
    """Set the setting NAME to VALUE in config.toml.

    Separate the items of a list with commas: a,b. If VALUE is -, it is read from stdin, so that a key does not appear
    in the shell's history.
    """
    path = write_setting(name, sys.stdin.read().strip() if value == "-" else value)
    click.echo(f"{name} is set in {path}.", err=True)
    _warn_of_variables(name)


@config.command()
@click.argument("name", shell_complete=_complete)
def unset(name: str) -> None:
    """Remove the setting NAME from config.toml."""
    path = remove_setting(name)
    done = f"{name} was removed from {path}" if path else f"{name} is not set in {config_file()}"
    click.echo(f"{done}.", err=True)
    _warn_of_variables(name)


@config.command()
def path() -> None:
    """Print the path of config.toml, whether or not it exists."""
    click.echo(config_file())


def _warn_of_variables(name: str) -> None:
    """Warn if an environment variable overrides the file."""
    name = current_name(name)
    if name not in SETTINGS:
        return
    origin = load_settings().origins[name]
    if origin not in ("default", str(config_file())):
        click.echo(f"{origin} is set in the environment and overrides config.toml for {name}.", err=True)


def _described(name: str, settings: Settings) -> dict[str, object]:
    value = None if name in SECRETS else plain(vars(settings)[name])
    setting, origin = SETTINGS[name], settings.origins[name]
    variable = f"INGLE_{name.upper()}"
    return {"name": name, "value": value, "origin": origin, "variable": variable, "meaning": setting.meaning}


def _words(name: str, settings: Settings) -> str:
    value = plain(vars(settings)[name])
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
    """Whether the value None of a setting means auto."""
    try:
        return SETTINGS[name].parse("auto") is None
    except ValueError:
        return False
