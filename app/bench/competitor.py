"""Competitors: the interface between the rounds of a benchmark and an engine or server that generates tokens."""

from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from app.bench.sample import Sample
from app.bench.workload import Load, Prompts
from app.errors import AppError, InvalidSetting


class CompetitorFailed(AppError):
    """A program that is measured does not start, ended, or gave what makes no sense."""


class UnsuitableLoad(InvalidSetting):
    """A load that the engine cannot run as it is asked for."""


def check_context(load: Load, context: int) -> None:
    """Raise UnsuitableLoad for a load whose streams are longer than a context; 0: not known."""
    if 0 < context < load.context:
        raise UnsuitableLoad(
            f"A prompt of {load.prompt_tokens:,} tokens and a reply of {load.output_tokens:,} do not fit the context, "
            f"which holds {context:,}",
            "Use fewer --prompt-tokens or --output-tokens, or raise --context as far as the model allows.",
        )


class Competitor(Protocol):
    """Someone who generates tokens, ready to do so, and idle until told."""

    @property
    def name(self) -> str: ...

    @property
    def build(self) -> str:
        """Version, compiler, instruction sets: what its figures depend on."""
        ...

    @property
    def pid(self) -> int | None:
        """The process that stands by while others are measured; None where there is none."""
        ...

    def warm_up(self, load: Load, prompts: Prompts) -> None:
        """Run a load whose times do not count."""
        ...

    def measure(self, load: Load, prompts: Prompts) -> Sample:
        """Run a load once. Greedy, every reply as long as asked for. Raises CompetitorFailed or EngineError."""
        ...


OWN_NAME = "ingle"


def own_build(kernels: str) -> str:
    """The version that is installed, and the kernels that it runs with."""
    try:
        return f"inglenook {version('inglenook')}, {kernels} kernels"
    except PackageNotFoundError:
        return f"a checkout of inglenook, {kernels} kernels"
