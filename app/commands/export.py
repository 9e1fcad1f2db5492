"""`ingle export`: write chats, settings, and the names of the models to one archive."""

from pathlib import Path

import click

from app.commands.archive import StoredName, write_archive
from app.history.history import History
from app.models.store import ModelStore
from app.settings.settings import load_settings

EXAMPLES = """\b
Examples:
  ingle export backup.zip
"""


@click.command(epilog=EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path))
def export(file: Path) -> None:
    """Write an archive of all chats, presets, and settings, and of the names of the models.

    The settings are those of config.toml. Keys, tokens, and private chats are left out, and so are the models
    themselves. `ingle import` reads the archive on this or another machine.
    """
    settings = load_settings()
    models = [StoredName(model.name, model.size) for model in ModelStore(settings).entries()]
    with History(settings.history_dir, lambda line: click.echo(line, err=True)) as history:
        count = write_archive(file, history, models)
    click.echo(f"{file} has {count} chats, the settings without keys, and {len(models)} names of models.", err=True)
