"""`ingle rm`: remove models from this machine."""

import click

from app.commands.options import stored_names
from app.models.store import ModelStore
from app.progress import format_bytes
from app.settings.settings import load_settings

EXAMPLES = """\b
Examples:
  ingle rm smollm2:135m
  ingle rm --dry-run smollm2:135m
  ingle rm HuggingFaceTB/SmolLM2-360M-Instruct
"""


@click.command(epilog=EXAMPLES)
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=stored_names)
@click.option("-n", "--dry-run", is_flag=True, help="Remove nothing; print what would be removed.")
def rm(names: tuple[str, ...], dry_run: bool) -> None:
    """Remove models, and print how much space that frees.

    A model in the Hugging Face cache is removed from that cache, so other tools would download it again. Models that
    other tools downloaded to that cache are not removed.
    """
    store = ModelStore(load_settings())
    for name in names:
        for removal in store.remove(name, really=not dry_run):
            cache = " from the Hugging Face cache, which other tools share" if removal.shared else ""
            done, freed = ("Would remove", "would be freed") if dry_run else ("Removed", "freed")
            click.echo(f"{done} {removal.path}{cache}: {format_bytes(removal.freed)} {freed}.", err=True)
