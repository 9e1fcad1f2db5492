"""`ingle show`: print details of a model, read from its files."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from app.commands.fit import described
from app.commands.options import stored_names
from app.commands.output import as_json, echo_table
from app.generation.generic_tools import ToolSupport
from app.models.details import ModelDetails, details_of
from app.models.sampling_defaults import DEFAULT_SAMPLING
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from app.progress import format_bytes, progress_on_stderr
from app.settings.settings import Settings, load_settings

if TYPE_CHECKING:
    from app.models.fit import ModelFit

_TOOLS = {
    ToolSupport.NATIVE: "native",
    ToolSupport.GENERIC: "generic (described as text, calls constrained to JSON)",
    ToolSupport.NONE: "-",
}
EXAMPLES = """\b
Examples:
  ingle show smollm2:135m
  ingle show ./my-model.gguf --fit
  ingle show org/repo --json | jq .parameters
"""


@click.command(epilog=EXAMPLES)
@click.argument("name", required=False, shell_complete=stored_names)
@click.option(
    "--fit", "with_fit", is_flag=True, help="Also check whether the model fits in memory. Takes a few seconds."
)
@click.option("--json", "as_object", is_flag=True, help="Print a JSON object.")
def show(name: str | None, with_fit: bool, as_object: bool) -> None:
    """Show details of the model NAME: size, tensor types, and abilities of the chat template. No weights are loaded.

    NAME is a stored model, or the path of a GGUF file or a folder. Default: the model of the settings.
    """
    settings = load_settings(model=name)
    store = ModelStore(settings)
    stored = store.resolve(settings.model, progress_on_stderr())
    details = details_of(stored, store.catalog, store.hub_models)
    fit = _fit(stored, settings) if with_fit else None
    support = _tool_support(details, settings)
    if as_object:
        shown = {**asdict(details), "tool_support": support.value}
        click.echo(as_json({**shown, "fit": described(fit)} if fit else shown))
        return
    echo_table([*_facts(details, support), *([("MEMORY", _verdict(fit))] if fit else [])])
    click.echo()
    rows = [
        (part.name, part.tensors, f"{part.parameters:,}", format_bytes(part.size), _types(part.types))
        for part in details.tensors
    ]
    echo_table([("CLASS", "TENSORS", "PARAMETERS", "SIZE", "TYPES"), *rows])


def _fit(stored: StoredModel, settings: Settings) -> "ModelFit":
    from app.models.fit import fit_stored  # imports torch

    return fit_stored(stored, settings)


def _verdict(fit: "ModelFit") -> str:
    from app.models.fit import verdict

    return verdict(fit)


def _tool_support(details: ModelDetails, settings: Settings) -> ToolSupport:
    if details.template is None:
        return ToolSupport.NONE
    if details.template.tools:
        return ToolSupport.NATIVE
    return ToolSupport.GENERIC if settings.generic_tools else ToolSupport.NONE


def _facts(details: ModelDetails, support: ToolSupport) -> list[tuple[str, object]]:
    return [
        ("NAME", details.name),
        ("PATH", details.path),
        ("SOURCE", details.source),
        ("SIZE", format_bytes(details.size)),
        ("ARCHITECTURE", details.architecture or "-"),
        ("PARAMETERS", _parameters(details)),
        ("QUANTIZATION", details.quantization or "-"),
        ("CONTEXT", _tokens(details.context_length)),
        ("VOCABULARY", _tokens(details.vocab_size)),
        ("CHAT TEMPLATE", _features(details)),
        ("TOOLS", _TOOLS[support]),
        ("SAMPLING", details.sampling or f"{DEFAULT_SAMPLING} (the model recommends none)"),
        ("LICENSE", details.license or "-"),
        *([("PROBLEM", details.problem)] if details.problem else []),
    ]


def _parameters(details: ModelDetails) -> str:
    total, active = f"{details.parameters:,}", details.active_parameters
    return total if active == details.parameters else f"{total}, of which about {active:,} compute each token"


def _features(details: ModelDetails) -> str:
    able = [name for name, there in asdict(details.template).items() if there] if details.template else ["none"]
    return ", ".join([*able, *(["fill in the middle"] if details.fills_in_the_middle else [])]) or "plain"


def _tokens(count: int | None) -> str:
    return "-" if count is None else f"{count:,} tokens"


def _types(types: dict[str, int]) -> str:
    if len(types) == 1:
        return next(iter(types))
    return ", ".join(f"{name} ({format_bytes(size)})" for name, size in types.items())
