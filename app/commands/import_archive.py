"""`ingle import`: add the chats of an archive, or of another program, and take over settings."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from app.commands.archive import Archive, StoredName, is_archive, read_archive
from app.history.chat_import import add_archived, read_chats
from app.history.history import History
from app.history.records import HistoryUnavailable
from app.models.store import ModelStore
from app.settings.config_file import changed_settings, take_settings
from app.settings.settings import Settings, load_settings
from app.text.terminal_text import sanitize

EXAMPLES = """\b
Examples:
  ingle import backup.zip
  ingle import backup.zip --settings
  ingle import conversations.json
"""
_PULLABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")  # names that a shell reads as one word


@click.command("import", epilog=EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--settings/--no-settings",
    "with_settings",
    default=None,
    help="Take the settings of the archive, which replace yours. Default: ask, or leave them without a terminal.",
)
def import_archive(file: Path, with_settings: bool | None) -> None:
    """Add the chats of FILE: an archive of `ingle export`, a JSON export of the chat, or ChatGPT's conversations.json.

    Chats that are already here are left out. Models are not part of an archive: the command that downloads them is
    printed.
    """
    settings = load_settings()
    archive = read_archive(file) if is_archive(file) else Archive(read_chats(file), (), {}, ())
    changes = changed_settings(archive.settings)  # also checks them, before anything is changed
    with History(settings.history_dir, lambda line: click.echo(line, err=True)) as history:
        for notice in history.notices:
            if not notice.is_saved:
                raise HistoryUnavailable(notice.message, notice.remedy)
        added = add_archived(history, archive.chats, archive.presets)
    left_out = len(archive.chats) - added
    click.echo(f"{added} chats were added" + (f"; {left_out} were here already." if left_out else "."), err=True)
    if changes and _wants(changes, with_settings):
        click.echo(f"The settings were written to {take_settings(changes)}.", err=True)
    _list_models(archive.models, settings)


def _wants(changes: Mapping[str, Any], with_settings: bool | None) -> bool:
    """Show the settings that differ, and return whether to take them."""
    click.echo("Settings of the archive that differ from yours:", err=True)
    for name, value in changes.items():
        click.echo(f"  {name} = {sanitize(repr(value))}", err=True)
    if with_settings is None and sys.stdin.isatty():
        return click.confirm("Take them?", err=True)
    if not with_settings:
        click.echo("They were left out. --settings takes them.", err=True)
    return bool(with_settings)


def _list_models(models: Sequence[StoredName], settings: Settings) -> None:
    """Print the command that downloads the models that are not on this machine."""
    store = ModelStore(settings)
    names = [one.name for one in models if _PULLABLE.fullmatch(one.name) and store.find_known(one.name) is None]
    if names:
        click.echo(f"Models that are not here:\n  ingle pull {' '.join(names)}", err=True)
