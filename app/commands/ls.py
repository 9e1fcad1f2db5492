"""`ingle ls`: the models on this machine."""

import click

from app.commands.listing import as_json, echo_table
from app.config import load_settings
from app.models.store import ModelStore
from app.progress import format_bytes

EXAMPLES = """\b
Examples:
  ingle ls
  ingle ls --json | jq -r '.[].path'
"""


@click.command(epilog=EXAMPLES)
@click.option("--json", "as_array", is_flag=True, help="Print a JSON array.")
def ls(as_array: bool) -> None:
    """List the models on this machine, including those that other tools have put in the Hugging Face cache."""
    settings = load_settings()
    models = ModelStore(settings).entries()
    if as_array:
        click.echo(as_json(models))
    elif models:
        rows = [
            (m.name, format_bytes(m.size), m.quantization or "-", (m.stored_at or "-")[:10], m.path) for m in models
        ]
        echo_table([("NAME", "SIZE", "QUANT", "STORED", "PATH"), *rows])
    else:
        click.echo(f"No model is stored yet.\ntry: ingle pull {settings.model}", err=True)
