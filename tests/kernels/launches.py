"""Record kernel launches instead of running them. This needs no GPU, and the tensors need no memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any
from unittest import mock

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, TensorWrapper, create_function_from_signature

# Names of constants that are tensor sizes and loop counts (SIZES), or that select the meaning of values (FORM). All
# others are tile sizes.
SIZES = {"COLUMNS", "GROUPS", "SPLITS", "HEADS", "KV_HEADS"}
PACKING = {
    *(
        "GROUP",
        "UNIT",
        "LOW",
        "HIGH",
        "RATIO",
        "ZERO",
        "MINIMUMS",
        "SUB_SCALE_ZERO",
        "NIBBLES",
        "NESTED_BLOCK",
        "RAGGED",
    ),
}
GATES = {"GATED", "GATE", "SIGMOID", "NORMALIZED", "GROUPED"}
FORM = PACKING | GATES | {"ADD", "EARLY", "SINKS", "CAPPED", "WINDOWED", "EXPONENT", "WIDTH"}
GRID_LIMITS = (2**31 - 1, 65535, 65535)
# Properties of arguments (multiple of 16, 64-bit index, equal to one) are the same for all architectures.
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


@dataclass(frozen=True)
class Launch:
    """A kernel launch with everything that its machine code depends on, except the architecture. Can be pickled."""

    module: str
    name: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]  # warps and stages

    @property
    def kernel(self) -> Any:
        """The kernel's JITFunction."""
        return getattr(import_module(self.module), self.name)

    @property
    def tile(self) -> str:
        """The kernel's name with its tile sizes, without tensor sizes."""
        return repr((self.name, self._constants(lambda name: name not in SIZES | FORM)))

    @property
    def details(self) -> set[str]:
        """The warps and stages, the dtypes, and the constants in FORM, one at a time."""
        types = [(name, kind) for name, kind in self.signature.items() if not name.isupper()]
        properties = [*self._constants(FORM.__contains__), *types, *self.options.items()]
        return {repr((self.name, *it)) for it in properties}

    @property
    def form(self) -> str:
        """The constants in FORM together."""
        return repr(self._constants(FORM.__contains__))

    def _constants(self, wanted: Callable[[str], bool]) -> list[tuple[str, Any]]:
        named = [(self.kernel.params[path[0]], value) for path, value in self.constants.items()]
        return [(it.name, value) for it, value in named if it.is_constexpr and wanted(it.name)]

    def __str__(self) -> str:
        names = list(self.signature)
        constants = [f"{names[path[0]]}={value}" for path, value in self.constants.items()]
        types = [f"{name}:{kind}" for name, kind in self.signature.items() if kind.startswith("*")]
        options = [f"{name}={value}" for name, value in self.options.items()]
        return f"{self.name}({', '.join(types + constants + options)})"


@cache
def _binder(kernel: Any) -> Any:
    return create_function_from_signature(kernel.signature, kernel.params, BACKEND)


def _keywords(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments, completed as `JITFunction.run` does."""
    return {**given, "debug": False, "instrumentation_mode": knobs.compilation.instrumentation_mode}


def _tensor(value: Any) -> Any:
    """Return the tensor that a kernel takes as one of another type, or another value unchanged."""
    return value.base if isinstance(value, TensorWrapper) else value


Each = Callable[[Launch, tuple[int, ...], dict[str, Any]], None]  # takes a launch, its grid, and its arguments


@contextmanager
def record_launches(each: Each = lambda launch, grid, arguments: None) -> Iterator[dict[str, Launch]]:
    """Record the distinct launches within the context, by key. Calls `each` for every launch.

    Raises ValueError if a grid is larger than GPUs support.
    """
    launches: dict[str, Launch] = {}

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        options = {name: value for name, value in keywords.items() if name not in kernel.signature.parameters}
        keywords = _keywords(kernel, keywords)
        bound, kinds, parsed = _binder(kernel)(*arguments, **keywords)
        grid = grid(bound) if callable(grid) else grid
        if any(size > most for size, most in zip(grid, GRID_LIMITS, strict=False)):
            raise ValueError(f"{kernel.fn.__name__}: a grid of {grid}")
        key = repr((kernel.fn.__module__, kernel.fn.__name__, kinds, options))
        if key not in launches:
            _, signature, constants, attributes = kernel._pack_args(BACKEND, keywords, bound, kinds, parsed)
            module, name = kernel.fn.__module__, kernel.fn.__name__
            launches[key] = Launch(module, name, signature, constants, attributes, options)
        each(launches[key], tuple(grid), {name: _tensor(value) for name, value in bound.items()})

    with mock.patch.object(JITFunction, "run", run):
        yield launches
