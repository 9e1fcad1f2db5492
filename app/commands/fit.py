"""`ingle fit`: check whether a model fits in memory before it is downloaded or loaded."""

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from app.commands.options import known_names, read_by
from app.commands.output import as_json, echo_table
from app.errors import EXIT_FAILURE
from app.models.families import BITS, KVShape, read_count, weight_bytes
from app.progress import Progress, format_bytes, progress_on_stderr
from app.settings.settings import Settings, load_settings
from app.settings.values import memory_size

if TYPE_CHECKING:
    from app.models.fit import ModelFit
    from engine.fit import CacheFit, Fit

EXAMPLES = """\b
Examples:
  ingle fit qwen3:8b
  ingle fit qwen3:8b-q8_0 --context 32768
  ingle fit org/repo:Q4_K_M --device cuda --memory 8GB
  ingle fit --recommended
  ingle fit --params 70b --layers 80 --kv-heads 64 --head-dim 128 --context 4096
"""


_POSITIVE = click.IntRange(min=1, max=1 << 30)


@click.command(epilog=EXAMPLES)
@click.argument("name", required=False, shell_complete=known_names)
@click.option("--context", type=int, help="Context length in tokens that must fit. Default: as long as memory allows.")
@click.option("--device", help="Device to compute on: auto, cpu, or cuda. Default: auto.")
@click.option(
    "--memory",
    metavar="SIZE",
    callback=read_by(memory_size),
    help="Assume this much device memory, such as 8GB. Default: the free memory.",
)
@click.option(
    "--quantize",
    metavar="METHOD",
    help="Assume that 16- and 32-bit layers are quantized while loading: fp8, int4, or nf4. Default: none.",
)
@click.option("--recommended", is_flag=True, help="Find the best chat model that fits, among a few free ones.")
@click.option(
    "--params", metavar="COUNT", callback=read_by(read_count), help="Formula: number of parameters, such as 70b."
)
@click.option("--layers", type=_POSITIVE, help="Formula: number of layers.")
@click.option("--kv-heads", type=_POSITIVE, help="Formula: number of key-value heads per layer.")
@click.option("--head-dim", type=_POSITIVE, help="Formula: dimension of a head.")
@click.option("--json", "as_object", is_flag=True, help="Print a JSON object.")
@click.pass_context
def fit(
    ctx: click.Context,
    name: str | None,
    context: int | None,
    device: str | None,
    memory: int | None,
    quantize: str | None,
    recommended: bool,
    params: int | None,
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    as_object: bool,
) -> None:
    """Check whether the model NAME fits in memory, and how long its context can be.

    A model that is not stored is not downloaded: only its headers are read from the Hub, a few megabytes. The engine
    decides by the same numbers when it loads the model. The exit status is 1 if the model does not fit.

    With --layers, --kv-heads, and --head-dim instead of NAME, print what a model of that shape needs, by formula.
    """
    if layers or kv_heads or head_dim or params:
        if name or not (layers and kv_heads and head_dim):
            raise click.UsageError("The formula needs --layers, --kv-heads, and --head-dim, without NAME.")
        _echo_formula(KVShape(layers, kv_heads, head_dim), context or 0, params or 0, as_object=as_object)
        return
    if recommended and (name or memory):
        raise click.UsageError("--recommended cannot be combined with NAME or --memory.")
    settings = load_settings(model=name, context=context, device=device, quantize=quantize)
    find = _find_recommended if recommended else partial(_find, memory=memory or 0)
    found = find(settings, progress_on_stderr(quiet=as_object))
    if as_object:
        click.echo(as_json({**described(found), "tokens_per_second": _speed(found, settings)}))
    else:
        _echo_fit(found, _speed(found, settings))
    if not found.is_possible:
        ctx.exit(EXIT_FAILURE)


def _find(settings: Settings, progress: Progress, memory: int) -> "ModelFit":
    from app.models.fit import fit_model  # imported late, because it imports torch

    return fit_model(settings.model, settings, progress, memory)


def _find_recommended(settings: Settings, progress: Progress) -> "ModelFit":
    from app.models.fit import recommended_fit

    return recommended_fit(settings, progress)


def _speed(found: "ModelFit", settings: Settings) -> float | None:
    """Return the expected decode speed in tokens per second; None if it is unknown on this device."""
    from app.models.decode_rate import expected_speed, measured_rate

    rate = measured_rate(settings.state_dir, found.fit.device)
    return expected_speed(rate, found.fit.active_weights) if found.is_possible else None


def _echo_fit(found: "ModelFit", speed: float | None) -> None:
    from app.models.fit import verdict

    fit = found.fit
    click.echo(f"{found.name} {verdict(found)}\n")
    stored = "stored" if found.is_stored else "to download"
    echo_table(
        [
            ("FILES", f"{format_bytes(found.size)}, {stored}"),
            ("DEVICE", f"{fit.device}, {format_bytes(fit.memory)} free"),
            ("WEIGHTS", _weights(fit)),
            ("STEPS", format_bytes(fit.needs.steps)),
            *([("SPEED", f"about {speed:.3g} tokens per second")] if speed else []),
            *_cache_limit(fit),
        ]
    )
    if fit.caches:
        click.echo()
        rows = [(it.kv_type, f"{it.context:,}", _per_token(it), format_bytes(it.size)) for it in fit.caches]
        echo_table([("KV", "CONTEXT", "PER TOKEN", "TOTAL"), *rows])


def _weights(fit: "Fit") -> str:
    size = format_bytes(fit.needs.weights)
    if fit.active_elements == fit.elements:
        return size
    total, active = (f"{count / 1e9:.3g} billion" for count in (fit.elements, fit.active_elements))
    return f"{size}, of which each token reads {format_bytes(fit.active_weights)} ({active} of {total} parameters)"


def _cache_limit(fit: "Fit") -> list[tuple[str, str]]:
    """Return the row of the default limit of the KV cache, if there is one."""
    if not fit.kv_limit:
        return []
    return [("KV CACHE", f"at most {format_bytes(fit.kv_limit)}; --context or INGLE_GPU_MEMORY raises the limit")]


def _per_token(cache: "CacheFit") -> str:
    """Return the size per token, and that of a state if there are recurrent layers.

    Layers with a sliding window are separate, because they stop growing at its length.
    """
    parts = [
        format_bytes(size) + ("" if window is None else f" up to {window:,} tokens")
        for window, size in cache.token_bytes.items()
    ]
    if cache.state_bytes:
        parts.append(f"{format_bytes(cache.state_bytes)} every {cache.spacing:,} tokens")
    return " + ".join(parts)


def described(found: "ModelFit") -> dict[str, Any]:
    """Convert a fit to plain JSON types."""
    from app.models.fit import verdict

    return {
        "name": found.name,
        "verdict": verdict(found),
        "size": found.size,
        "is_stored": found.is_stored,
        **_described(found.fit),
        "on_cpu": _described(found.on_cpu) if found.on_cpu else None,
        "try": {"name": found.smaller or None, "quantize": "int4" if found.int4 else None},
    }


def _described(fit: "Fit") -> dict[str, Any]:
    return {
        "fits": fit.is_possible,
        "device": fit.device,
        "memory": fit.memory,
        "needed": fit.needed,
        "weights": fit.needs.weights,
        "active_weights": fit.active_weights,
        "parameters": fit.elements or None,
        "active_parameters": fit.active_elements or None,
        "steps": fit.needs.steps,
        "wanted_context": fit.wanted,
        "kv_limit": fit.kv_limit or None,
        "kv": [
            {
                "type": cache.kv_type,
                "context": cache.context,
                "size": cache.size,
                "token_bytes": sum(cache.token_bytes.values()),
                "state_bytes": cache.state_bytes or None,
                "state_spacing": cache.spacing or None,
                "groups": [{"window": window, "token_bytes": size} for window, size in cache.token_bytes.items()],
            }
            for cache in fit.caches
        ],
    }


def _echo_formula(shape: KVShape, context: int, parameters: int, *, as_object: bool) -> None:
    kv = [{"bits": b, "token_bytes": shape.token_bytes(b), "size": context * shape.token_bytes(b)} for b in BITS[:2]]
    weights = [{"bits": bits, "size": weight_bytes(parameters, bits)} for bits in BITS if parameters]
    if as_object:
        click.echo(as_json({"context": context or None, "kv": kv, "weights": weights}))
        return
    for it in kv:
        whole = f", {format_bytes(it['size'])} for {context:,} tokens" if context else ""
        click.echo(f"KV in {it['bits']} bits: {it['token_bytes']:,} bytes per token{whole}")
    for it in weights:
        click.echo(f"weights in {it['bits']} bits: {format_bytes(it['size'])}")
