"""`ingle quantize`: write a quantized copy of a model, and print its path."""

import os
from functools import partial
from hashlib import sha256
from pathlib import Path

import click

from app.bench.workload import counted
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
@click.option("--to", "method", type=click.Choice(METHODS), required=True, help="Format of the weights.")
@click.option(
    "--group-size",
    type=click.Choice(["32", "64", "128"]),
    help="Columns that share a scale in int4. Default: the largest size that divides every matrix.",
)
@click.option(
    "--no-calibration", is_flag=True, help="Do not run the model to find out which columns matter most (int4 only)."
)
@click.option("--double-quant", is_flag=True, help="Quantize the scales as well (nf4 only).")
@click.option("--json", "as_object", is_flag=True, help="Print a JSON object about the copy instead of its path.")
@click.option("-q", "--quiet", is_flag=True, help="Print no progress.")
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
    """Write a quantized copy of the model SOURCE to the new folder TARGET.

    SOURCE is a folder with config.json and safetensors files of 16- or 32-bit weights, or the name of a downloaded
    repository. fp8 halves 16-bit weights with almost no loss. int4 and nf4 take a little over a quarter.

    Only linear layers are quantized: embeddings, head, and norms stay as they are. For int4 the model first processes a
    page of text to find out which columns matter most, which takes as much memory as its files. Other programs can read
    the copy: fp8 and int4 have the format of compressed-tensors, nf4 that of bitsandbytes.
    """
    if group_size and method != "int4":
        raise click.UsageError("--group-size needs --to int4.")
    if no_calibration and method != "int4":
        raise click.UsageError("--no-calibration needs --to int4.")
    if double_quant and method != "nf4":
        raise click.UsageError("--double-quant needs --to nf4.")
    import torch

    from app.models.lock import model_lock
    from app.models.quantized_copy import measure, save_quantized
    from app.models.store import ModelStore
    from quant.quantized_storage import Method

    torch.set_num_threads(1)  # with several threads, the threads would wait for each other after every slab
    progress = progress_on_stderr(quiet=quiet)
    chosen = Method(method, int(group_size) if group_size else None, double_quant)
    settings = load_settings()
    model = ModelStore(settings).resolve(source, progress)
    key = f"copy-{sha256(os.fsencode(os.path.realpath(target))).hexdigest()}"
    with model_lock(settings.models_dir, key, str(target), progress):
        calibrated = method == "int4" and not no_calibration
        measured = partial(measure, model.path, progress) if calibrated else dict
        copy = save_quantized(model.path, target.absolute(), chosen, progress, measure=measured)
    before, after = format_bytes(copy.original_bytes), format_bytes(copy.size)
    progress.say(f"Quantized {counted(copy.layers, 'layer')} to {method}: from {before} to {after}.")
    click.echo(as_json(copy) if as_object else copy.path)
