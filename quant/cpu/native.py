"""Native code of this machine: kernels compiled by LLVM and loops compiled by numba, both cached in a folder.

The folder's name is a digest of all sources of the code, the compilers' versions, and the processor, because numba's
own cache key does not include edits in other modules. Kernels are compiled for a target, in parts with a file each,
since a model needs only the kernels of its weights. Loops are the same for all targets and call the core's kernels by
name, so a process can load only one target. A folder is used only if no other user can write to it, since it holds
machine code.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import binding, ir
from numba.core import config as numba_config

from quant.cpu.kernel import CORE, KERNELS, Kernel
from quant.cpu.tiers import Target

log = logging.getLogger(__name__)

CODE = "cpu-code"  # folder that contains the folders of all versions
KEPT = 4  # number of versions that are kept when a new one is compiled
NEEDED = 1 << 20  # free disk space in bytes that saving code requires

Entry = Callable[..., int]


class CodeFolder:
    """The cache folder for code compiled from `sources`, for this processor and these versions of the compilers.

    Kernels are compiled for `target`. Without `cache_dir`, nothing is cached.
    """

    def __init__(self, cache_dir: Path | None, sources: Iterable[Path], target: Target) -> None:
        self._target = target
        folder = cache_dir and cache_dir / CODE / _fingerprint(tuple(sources))
        self._problem = "" if folder is None else _make_private(folder)
        self.path = None if self._problem else folder

    @cached_property
    def problem(self) -> str:
        """The reason why code cannot be saved here; an empty string if it can, or if nothing is cached."""
        if self._problem or self.path is None:
            return self._problem
        try:
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(bytes(NEEDED))
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def holds(self, *parts: str) -> bool:
        """Whether kernels of these parts, and the loops, are in the folder."""
        names = [self._file_name(part, "*") for part in parts]
        return self.path is not None and all(any(self.path.glob(name)) for name in (*names, "**/*.nbc"))

    def load_kernels(self, part: str = CORE) -> None:
        """Make every kernel of a part callable from compiled code. Compiles kernels that are not in the folder."""
        if self._target in _engines and part in _engines[self._target]:
            return
        kernels = {name: made for name, made in KERNELS.items() if made.part == part}
        path = self.path and self.path / self._file_name(part, _digest(*sorted(kernels)))
        code = path and _read_checked(path)
        if not code:
            code = compile_kernels(kernels.values(), self._target)
            if path:
                _write_atomically(path, hashlib.sha256(code).digest() + code)
        _load(code, self._target, part, kernels)

    def _file_name(self, part: str, kernels: str) -> str:
        """Return a part's file name, which contains a digest of the kernels' names.

        A process that imports fewer modules has fewer kernels, and must not use a file with a different set.
        """
        return f"kernels-{self._target.tier}-{_digest(self._target.cpu, self._target.flags)}-{part}-{kernels}.o"

    def load_function(self, function: Callable[..., Any], signature: Any) -> Entry:
        """Compile a function with numba for one signature, without the GIL. The kernels that it calls must already be
        loaded.
        """
        if self.path:
            try:
                return self._load_kept(function, signature, self.path)
            except Exception as problem:  # noqa: BLE001  # a damaged file can raise anything; it is only a cache
                log.warning("cannot use the compiled code in %s, compiling it again: %s", self.path, problem)
                shutil.rmtree(self.path, ignore_errors=True)
        return _compiled(numba.njit(nogil=True, error_model="numpy")(function), signature)

    def _load_kept(self, function: Callable[..., Any], signature: Any, path: Path) -> Entry:
        dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
        with _writable(path, is_writable=not self.problem) as folder:
            numba_config.CACHE_DIR = str(folder)  # numba reads it when caching is enabled
            dispatcher.enable_caching()
            entry = _compiled(dispatcher, signature)
            _close_to_others(folder)
        return entry

    def remove_old_versions(self) -> None:
        """Remove the folders of other versions, except the most recently used."""
        if self.path and self.path.exists() and not self.problem:
            os.utime(self.path)
            versions = sorted(self.path.parent.iterdir(), key=_last_used, reverse=True)
            for version in versions[KEPT:]:
                shutil.rmtree(version, ignore_errors=True)


def _last_used(version: Path) -> float:
    try:
        return version.stat().st_mtime
    except OSError:
        return 0.0  # another process has removed it


def _digest(*words: str) -> str:
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]


def _compiled(dispatcher: Any, signature: Any) -> Entry:
    dispatcher.compile(signature)
    entry: Entry = dispatcher
    return entry


def _read_checked(path: Path) -> bytes | None:
    """Return the code in a file that starts with its digest; None if it is damaged or missing."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:32], data[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def compile_kernels(kernels: Iterable[Kernel], target: Target) -> bytes:
    """Compile kernels to one object file."""
    code: bytes = _machine(target).emit_object(_optimized(kernels, target))
    return code


def _optimized(kernels: Iterable[Kernel], target: Target) -> Any:
    module, machine = ir.Module("ingle_kernels"), _machine(target)
    for made in kernels:
        made.emit(module, target)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return parsed


# engines by target and part; they keep the loaded code mapped until the process ends
_engines: dict[Target, dict[str, Any]] = {}
_addresses: dict[str, int] = {}


def address_of(called: Any) -> int:
    """Return the address of a kernel, which must be loaded."""
    return _addresses[called.symbol]


def link(code: bytes, target: Target) -> Any:
    """Map an object file into memory, and return the engine that owns it and has the addresses of its functions."""
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(target))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _load(code: bytes, target: Target, part: str, names: Iterable[str]) -> None:
    """Register the addresses of the kernels in an object file, for compiled Python."""
    if _engines.keys() - {target}:
        raise RuntimeError(f"this process has loaded kernels for a tier other than {target.tier}")
    engine = link(code, target)
    for name in names:
        _addresses[name] = engine.get_function_address(name)
        binding.add_symbol(name, _addresses[name])
    _engines.setdefault(target, {})[part] = engine


def _machine(target: Target) -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.flags, opt=3, jit=True
    )


def _write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that other processes see all of it or none."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _writable(path: Path, *, is_writable: bool) -> Iterator[Path]:
    """Yield a folder that numba can write to: `path`, or a copy. Numba reads its cache only from a writable folder."""
    if is_writable:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ingle-") as copy:
        yield Path(shutil.copytree(path, copy, dirs_exist_ok=True))


def _close_to_others(folder: Path) -> None:
    """Remove access for other users: numba creates its files by the umask."""
    for path in folder.rglob("*"):
        mode = path.stat().st_mode
        if stat.S_IMODE(mode) & 0o077:
            path.chmod(stat.S_IMODE(mode) & 0o700)


def _make_private(folder: Path) -> str:
    """Create the folder with access for this user only.

    Returns an empty string, or why that failed or why others could put code into the folder.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat()
    except OSError as error:
        return error.strerror or str(error)
    if os.name != "posix":
        return ""
    if owner.st_uid != os.getuid():
        return "it belongs to another user"
    return "other users can write to it" if owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


@cache
def _fingerprint(sources: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    features = binding.get_host_cpu_features().flatten()
    versions = (platform.python_version(), numba.__version__, llvmlite.__version__, np.__version__)
    for text in (*versions, binding.get_host_cpu_name(), features):
        digest.update(text.encode() + b"\0")
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]
