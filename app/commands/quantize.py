"""`ingle quantize`: a copy of a model in fewer bits; its path goes to stdout."""

import os
from functools import partial
from hashlib import sha256
from pathlib import Path

import click

from app.commands.output import as_json
from app.progress import format_bytes, progress_on_stderr
from app.settings.settings import load_settings

METHODS = ("fp8", "int4", "nf4")

EXAMPLES = """\b
Examples:
  ingle quantize ~/models/SmolLM2-1.7B ~/models/SmolLM2-1.7B-INT4 --to int4
  ingle quantize HuggingFaceTB/SmolLM2-1.7B-Instruct SmolLM2-FP8 --to fp8
  ingle quantize ~/models/SmolLM2-1.7B SmolLM2-NF4 --to nf4 --double-quant --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--to", "method", type=click.Choice(METHODS), required=True, help="What the weights become.")
@click.option(
    "--group-size",
    type=click.Choice(["32", "64", "128"]),
    help="Columns that share a scale, in int4; without it, as many as divide every matrix.",
)
@click.option("--no-calibration", is_flag=True, help="Do not run the model to see which columns matter, for int4.")
@click.option("--double-quant", is_flag=True, help="Quantize the scales of nf4, too.")
@click.option("--json", "as_object", is_flag=True, help="Print what was written as a JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no narration.")
def quantize(
    source: str,
    target: Path,
    method: str,
    group_size: str | None,
    no_calibration: bool,
    double_quant: bool,
    as_object: bool,
    quiet: bool,
) -> None:
    """Write a copy of the model SOURCE, its linear layers in fewer bits, to the new folder TARGET.

    SOURCE is a folder with config.json and safetensors files, of weights of 16 or 32 bits, or the name of a repository
    that was pulled. fp8 halves 16 bits and is hard to tell from them; int4 and nf4 take a little over a quarter.
    For int4 the model first reads a page of text, so that the columns that matter are kept best; that takes as much
    memory as its files. Embeddings, head and norms stay as they are. The copy is laid out as other programs read it:
    fp8 and int4 by compressed-tensors, nf4 by bitsandbytes.
    """
    if group_size and method != "int4":
        raise click.UsageError("--group-size is for --to int4 alone.")
    if no_calibration and method != "int4":
        raise click.UsageError("--no-calibration is for --to int4 alone.")
    if double_quant and method != "nf4":
        raise click.UsageError("--double-quant is for --to nf4 alone.")
    import torch

    from app.models.lock import only_one
    from app.models.quantized_copy import measure, save_quantized
    from app.models.store import ModelStore
    from quant.quantized_storage import Method

    torch.set_num_threads(1)  # its threads wait for each other after every slab, and are slower than one
    progress = progress_on_stderr(quiet=quiet)
    chosen = Method(method, int(group_size) if group_size else None, double_quant)
    settings = load_settings()
    model = ModelStore(settings).resolve(source, progress)
    key = f"copy-{sha256(os.fsencode(os.path.realpath(target))).hexdigest()}"
    with only_one(settings.models_dir, key, str(target), progress):
        calibrated = method == "int4" and not no_calibration
        measured = partial(measure, model.path, progress) if calibrated else dict
        copy = save_quantized(model.path, target.absolute(), chosen, progress, measure=measured)
    before, after = format_bytes(copy.original_bytes), format_bytes(copy.size)
    progress.say(f"{copy.layers} layers are {method} now: {before} became {after}.")
    click.echo(as_json(copy) if as_object else copy.path)
