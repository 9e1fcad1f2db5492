"""What wrappers launch, taken down in place of being launched: no GPU is needed, and no tensor has any memory.

Refuses to know which wrappers there are (`tests.kernels.calls` does) and how a kernel is compiled.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any
from unittest import mock

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

GRID_LIMITS = (2**31 - 1, 65535, 65535)
# What is told of arguments (a multiple of 16, an index of 64 bits, one) is alike for all architectures.
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


@dataclass(frozen=True)
class Launch:
    """A kernel with all that its machine code depends on but the architecture. Plain data, for other processes."""

    module: str
    name: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]  # warps and stages, as they were asked for

    @property
    def kernel(self) -> Any:
        """The JITFunction."""
        return getattr(import_module(self.module), self.name)

    @property
    def key(self) -> str:
        """Launches of equal keys have the same machine code."""
        return repr((self.module, self.name, self.signature, self.constants, self.attributes, self.options))

    @property
    def configuration(self) -> str:
        """Launches of one configuration differ in what Triton makes of numbers: that one is 1, or a multiple of 16."""
        parameters = self.kernel.params
        types = [kind for kind in self.signature.values() if kind.startswith("*")]
        constants = [(path, value) for path, value in self.constants.items() if parameters[path[0]].is_constexpr]
        return repr((self.module, self.name, types, constants, self.options))

    def __str__(self) -> str:
        names = list(self.signature)
        constants = [f"{names[path[0]]}={value}" for path, value in self.constants.items()]
        types = [f"{name}:{kind}" for name, kind in self.signature.items() if kind.startswith("*")]
        options = [f"{name}={value}" for name, value in self.options.items()]
        return f"{self.name}({', '.join(types + constants + options)})"


@cache
def _binder(kernel: Any) -> Any:
    return create_function_from_signature(kernel.signature, kernel.params, BACKEND)


def _taken_down(kernel: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> tuple[Launch, dict[str, Any]]:
    """As `JITFunction.run` sees a launch, and the arguments by name."""
    options = {name: value for name, value in keywords.items() if name not in kernel.signature.parameters}
    keywords = {**keywords, "debug": False, "instrumentation_mode": knobs.compilation.instrumentation_mode}
    bound, kinds, parsed = _binder(kernel)(*arguments, **keywords)
    _, signature, constants, attributes = kernel._pack_args(BACKEND, keywords, bound, kinds, parsed)
    launch = Launch(kernel.fn.__module__, kernel.fn.__name__, signature, constants, attributes, options)
    return launch, bound


@contextmanager
def recorded() -> Iterator[dict[str, Launch]]:
    """Within, launches are taken down, each different one once, by its key.

    Raises ValueError where a grid is larger than a GPU takes.
    """
    launches: dict[str, Launch] = {}

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launch, bound = _taken_down(kernel, arguments, keywords)
        grid = grid(bound) if callable(grid) else grid
        if any(size > most for size, most in zip(grid, GRID_LIMITS, strict=False)):
            raise ValueError(f"{launch.name}: a grid of {grid}")
        launches.setdefault(launch.key, launch)

    with mock.patch.object(JITFunction, "run", run):
        yield launches
