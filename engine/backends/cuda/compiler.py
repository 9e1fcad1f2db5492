"""Find a C compiler for Triton, which launches kernels through a small Python module that it builds on the user's
machine.

Most users' machines have no compiler. These are tried in order: the one named by CC, gcc, clang, cc, and the one in the
`ziglang` package from PyPI. To test a compiler, this module builds a Python module with it and loads that module before
any kernel is launched. Triton caches what was built, including this test module.
"""

import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from engine.errors import NoCompiler

NAMES = ("gcc", "clang", "cc")
TIMEOUT = 300  # seconds; the first build with ziglang is slow, especially on a slow disk
INSTALL_COMPILER = "Run `pipx inject inglenook ziglang`, or install the system's compiler: `sudo apt install gcc`."
MODULE = "inglenook_trial"
SOURCE = """
#include <Python.h>
#include <dlfcn.h>
#include <stdlib.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "inglenook_trial", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_inglenook_trial(void) { return PyModule_Create(&definition); }
"""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler, given by its command line."""

    command: tuple[str, ...]

    def build(
        self,
        name: str,
        source: str,
        folder: str,
        library_dirs: list[str],
        include_dirs: list[str],
        libraries: list[str],
    ) -> str:
        """Build the Python module `name` from the C file `source` in `folder`, and return its path. This is Triton's
        build hook.

        Raises NoCompiler with the compiler's error.
        """
        target = str(Path(folder, name + sysconfig.get_config_var("EXT_SUFFIX")))
        includes = [f"-I{path}" for path in (*include_dirs, folder, python_headers())]
        linked = [*(f"-L{path}" for path in library_dirs), *(_linked(name, library_dirs) for name in libraries)]
        command = [*self.command, source, "-O3", "-shared", "-fPIC", *includes, *linked, "-o", target]
        try:
            subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=True)
        except subprocess.CalledProcessError as error:
            raise self._failed(_first_error(error.stderr)) from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise self._failed(str(error)) from None
        return target

    def _failed(self, why: str) -> NoCompiler:
        return NoCompiler(f"The C compiler `{shlex.join(self.command)}` failed: {why}", INSTALL_COMPILER)


def _linked(library: str, folders: list[str]) -> str:
    """Return the argument that links a library. A library file found in a folder is given by its path, which all
    compilers accept.
    """
    paths = (Path(folder, library) for folder in folders)
    named = f"-l:{library}" if ".so" in library else f"-l{library}"
    return next((str(path) for path in paths if path.is_file()), named)


def _first_error(text: str) -> str:
    """Return the first line of a compiler's output that mentions an error, or the last line if none does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "no error message"
    return next((line for line in lines if "error" in line.lower()), last)


def python_headers() -> str:
    """Return the folder that contains Python.h."""
    scheme = sysconfig.get_default_scheme()
    # Debian's default scheme points to /usr/local, where no package installs headers.
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]


def compilers(named: str | None) -> Iterator[Compiler]:
    """Yield all available compilers, best first. `named`: the user's choice, a command with optional arguments."""
    if named:
        yield Compiler(tuple(shlex.split(named)))
    for name in NAMES:
        if path := shutil.which(name):
            yield Compiler((path,))
    if find_spec("ziglang"):
        yield Compiler((sys.executable, "-m", "ziglang", "cc"))


def prepare_compiler() -> None:
    """Make Triton use a compiler that works. Call this before the first kernel is launched.

    The call takes about a second if Triton has built nothing yet, and hardly any time otherwise. Raises NoCompiler.
    """
    if not find_spec("triton"):
        raise NoCompiler("GPU kernels need Triton, which is not installed", "Install torch with CUDA.")
    from triton import knobs

    if not _launcher_is_built():
        knobs.build.impl = _working_compiler(knobs.build.cc).build


def _working_compiler(named: str | None) -> Compiler:
    headers = Path(python_headers(), "Python.h")
    if not headers.is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        remedy = (
            f"Run `sudo apt install python{version}-dev`, or install Inglenook with uv, whose Python includes them."
        )
        raise NoCompiler(f"Triton needs Python's header files, but {headers} does not exist", remedy)
    problem = NoCompiler("Triton needs a C compiler, and this machine has none", INSTALL_COMPILER)
    for compiler in compilers(named):
        try:
            _build_trial(compiler)
        except NoCompiler as error:
            problem = error
        else:
            return compiler
    raise problem


def _launcher_is_built() -> bool:
    """Whether Triton has cached the module that launches kernels. Before Triton 3.7 each kernel had its own module."""
    import triton
    from triton.runtime.build import platform_key
    from triton.runtime.cache import get_cache_manager

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
        return False
    source = Path(triton.__file__).with_name("backends") / "nvidia" / "driver.c"
    key = sha256((source.read_text(encoding="utf-8") + platform_key()).encode()).hexdigest()
    module = f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"
    return get_cache_manager(key).get_file(module) is not None


def _build_trial(compiler: Compiler) -> None:
    """Make Triton build and load a test module, or only load it if it is cached. Raises NoCompiler."""
    from triton import knobs
    from triton.runtime.build import compile_module_from_src

    knobs.build.impl = compiler.build
    try:
        # the compiler is part of the source, because Triton's cache key is the source
        compile_module_from_src(f"{SOURCE}// {compiler.command}\n", MODULE)
    except (OSError, ImportError, RuntimeError) as error:
        raise NoCompiler(f"Triton cannot build the module that launches kernels: {error}", INSTALL_COMPILER) from None
    finally:
        knobs.build.impl = None
