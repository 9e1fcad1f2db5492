"""The C compiler that Triton needs: a kernel is launched by a small Python module that Triton builds on the machine.

Most machines of users have no compiler. Found in this order: the one that CC names, gcc, clang, cc, and the one in the
`ziglang` package, which `pip` brings. Whichever it is builds a module once, which Python then loads, before any kernel
is launched: there is no other way to know that it can. Triton keeps what was built, and so does this.

Refuses to know GPUs, and what happens where there is no compiler: whoever asks is told what is missing and what to do.
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
PATIENCE = 300  # seconds; the first module that ziglang builds takes some, on a slow disk many
GET_ONE = "Run `pipx inject inglenook ziglang`, or install the system's: `sudo apt install gcc`."
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
    """How one is called."""

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
        """The path of the Python module `name`, built from the C file `source` in `folder`: Triton's build hook.

        Raises NoCompiler with what the compiler says.
        """
        target = str(Path(folder, name + sysconfig.get_config_var("EXT_SUFFIX")))
        includes = [f"-I{path}" for path in (*include_dirs, folder, python_headers())]
        linked = [*(f"-L{path}" for path in library_dirs), *(_linked(name, library_dirs) for name in libraries)]
        command = [*self.command, source, "-O3", "-shared", "-fPIC", *includes, *linked, "-o", target]
        try:
            subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=True)
        except subprocess.CalledProcessError as error:
            raise self._failed(_complaint(error.stderr)) from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise self._failed(str(error)) from None
        return target

    def _failed(self, why: str) -> NoCompiler:
        return NoCompiler(f"The C compiler `{shlex.join(self.command)}` builds nothing: {why}", GET_ONE)


def _linked(library: str, folders: list[str]) -> str:
    """A library as compilers take it. One that is a file in a folder by its path, which all compilers know."""
    paths = (Path(folder, library) for folder in folders)
    named = f"-l:{library}" if ".so" in library else f"-l{library}"
    return next((str(path) for path in paths if path.is_file()), named)


def _complaint(text: str) -> str:
    """The first line that tells an error, of all that a compiler says."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "it does not say why"
    return next((line for line in lines if "error" in line.lower()), last)


def python_headers() -> str:
    """The folder of Python.h."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme leads into /usr/local, where no package puts headers.
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]


def compilers(named: str | None) -> Iterator[Compiler]:
    """All there are, the best first. `named`: the one that the user names, with arguments or without."""
    if named:
        yield Compiler(tuple(shlex.split(named)))
    for name in NAMES:
        if path := shutil.which(name):
            yield Compiler((path,))
    if find_spec("ziglang"):
        yield Compiler((sys.executable, "-m", "ziglang", "cc"))


def prepare_compiler() -> None:
    """To be called before the first kernel is launched: has Triton build with a compiler that works.

    Takes a second where Triton has built nothing yet, and no time later. Raises NoCompiler.
    """
    if not find_spec("triton"):
        raise NoCompiler("Kernels for GPUs need Triton, which is not installed", "Install torch's build for CUDA.")
    from triton import knobs

    if not _nothing_is_left_to_build():
        knobs.build.impl = _working_compiler(knobs.build.cc).build


def _working_compiler(named: str | None) -> Compiler:
    headers = Path(python_headers(), "Python.h")
    if not headers.is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        remedy = f"Run `sudo apt install python{version}-dev`, or install with uv, whose Pythons have them."
        raise NoCompiler(f"Triton needs Python's header files, and there is no {headers}", remedy)
    problem = NoCompiler("Triton needs a C compiler, and this machine has none", GET_ONE)
    for compiler in compilers(named):
        try:
            _try(compiler)
        except NoCompiler as error:
            problem = error
        else:
            return compiler
    raise problem


def _nothing_is_left_to_build() -> bool:
    """Whether Triton's cache has the module that launches kernels. Up to 3.6 each kernel had one of its own."""
    import triton
    from triton.runtime.build import platform_key
    from triton.runtime.cache import get_cache_manager

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
        return False
    source = Path(triton.__file__).with_name("backends") / "nvidia" / "driver.c"
    key = sha256((source.read_text(encoding="utf-8") + platform_key()).encode()).hexdigest()
    module = f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"
    return get_cache_manager(key).get_file(module) is not None


def _try(compiler: Compiler) -> None:
    """Have Triton build a module and load it, or only load it, where it is in Triton's cache."""
    from triton import knobs
    from triton.runtime.build import compile_module_from_src

    knobs.build.impl = compiler.build
    try:
        compile_module_from_src(f"{SOURCE}// {compiler.command}\n", MODULE)  # the cache goes by the source
    except (OSError, ImportError, RuntimeError) as error:
        raise NoCompiler(f"Triton cannot build what launches kernels: {error}", GET_ONE) from None
    finally:
        knobs.build.impl = None
