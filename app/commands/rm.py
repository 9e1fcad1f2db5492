"""`ingle rm`: remove models."""

import click

from app.config import load_settings
from app.progress import format_bytes
from app.store import ModelStore

EXAMPLES = """\b
Examples:
  ingle rm smollm2:135m
"""


@click.command(epilog=EXAMPLES)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def rm(names: tuple[str, ...]) -> None:
    """Remove models, and say how much space that freed.

    A model that lies in the Hugging Face cache is removed from there too; other tools that use it would fetch it again.
    """
    store = ModelStore(load_settings())
    for name in names:
        for removal in store.remove(name):
            place = " from the Hugging Face cache, which other tools share" if removal.shared else ""
            click.echo(f"Removed {removal.path}{place}: {format_bytes(removal.freed)} freed.", err=True)
