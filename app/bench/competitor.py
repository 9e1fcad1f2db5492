"""The interface through which a benchmark measures an engine or a server that generates tokens."""

from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from app.bench.sample import Sample
from app.bench.workload import Load, Prompts
from app.errors import AppError, InvalidSetting


class CompetitorFailed(AppError):
    """A measured program did not start, ended early, or returned invalid output."""


class UnsuitableLoad(InvalidSetting):
    """The engine cannot run this load as requested."""


def check_context(load: Load, context: int) -> None:
    """Raise UnsuitableLoad if a stream of the load is longer than `context` tokens. 0: the context is unknown."""
    if 0 < context < load.context:
        raise UnsuitableLoad(
            f"A prompt of {load.prompt_tokens:,} tokens and a reply of {load.output_tokens:,} do not fit the context "
            f"of {context:,} tokens",
            "Lower --prompt-tokens or --output-tokens, or raise --context if the model supports it.",
        )


class Competitor(Protocol):
    """An engine or server that is loaded, and idle until it is measured."""

    @property
    def name(self) -> str: ...

    @property
    def build(self) -> str:
        """Version, compiler, and instruction sets of the program. The figures depend on them."""
        ...

    @property
    def pid(self) -> int | None:
        """Process id of the competitor; None if it has no process. The process is idle while other competitors are
        measured.
        """
        ...

    def warm_up(self, load: Load, prompts: Prompts) -> None:
        """Run a load whose times do not count."""
        ...

    def measure(self, load: Load, prompts: Prompts) -> Sample:
        """Run a load once, with greedy replies of full length. Raises CompetitorFailed or EngineError."""
        ...


OWN_NAME = "ingle"


def own_build(kernels: str) -> str:
    """Return the version of Inglenook and the kernels that it uses."""
    try:
        return f"inglenook {version('inglenook')}, {kernels} kernels"
    except PackageNotFoundError:
        return f"a checkout of inglenook, {kernels} kernels"
