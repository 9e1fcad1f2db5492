"""Find kernels whose key in Triton's cache depends on the kernels that a process has launched before.

Such a kernel is compiled in advance under one key, and looked for under another. Triton leaves global constants of
called functions out of a key unless it knows the key of the called function, so functions of several kernels must not
use any.
"""

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from triton.runtime.jit import JITFunction


def functions_of(*packages: ModuleType) -> dict[str, JITFunction]:
    """Return the kernels, and the functions that are parts of kernels, by module and name."""
    found: dict[str, JITFunction] = {}
    for package in packages:
        for module in iter_modules(package.__path__, package.__name__ + "."):
            members = vars(import_module(module.name)).values()
            found |= {f"{it.fn.__module__}.{it.fn.__name__}": it for it in members if isinstance(it, JITFunction)}
    return found


def order_dependent(functions: Sequence[JITFunction]) -> list[str]:
    """Return the names of the kernels whose key differs after all others."""
    kernels = [it for it in functions if it.fn.__name__.endswith("_kernel")]
    return [
        kernel.fn.__name__
        for kernel in kernels
        if _key(kernel, functions, ()) != _key(kernel, functions, [it for it in kernels if it is not kernel])
    ]


def _key(kernel: JITFunction, functions: Sequence[JITFunction], before: Sequence[JITFunction]) -> str:
    for it in functions:  # as in a new process
        it.hash, it.used_global_vals = None, {}
    for it in before:
        _ = it.cache_key
    return str(kernel.cache_key)
