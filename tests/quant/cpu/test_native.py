"""The cache of compiled code: permissions, versions, and recovery from damaged files."""

import errno
import json
import os
import platform
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import llvmlite
import numba
import numpy as np
import pytest
from llvmlite import binding, ir

from quant.cpu import native
from quant.cpu.kernel import CORE, KERNELS
from quant.cpu.native import KEPT, CodeFolder
from quant.cpu.norms import norm_factor
from quant.cpu.tiers import choose
from tests.support.processes import HANGING_SECONDS, Started

TARGET = choose("auto")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}

# A program that uses a code folder and compiles quickly. It prints its result and whether it compiled anything.
PROGRAM = """
import os, sys
from pathlib import Path
from numba import types
from quant.cpu import kernel, native, tiers

@kernel.kernel
def twice(e, x) -> object:
    return e.at(x, x)

@kernel.kernel
def thrice(e, x) -> object:
    return e.at(e.at(x, x), x)

@kernel.jit
def five_times(x):
    return twice(x) + thrice(x)

def entry(x):
    return five_times(x)

compile_kernels = native.compile_kernels
def noted(kernels, target):
    print("compiled", end=" ")
    return compile_kernels(kernels, target)
native.compile_kernels = noted

if "umask 0" in sys.argv:
    os.umask(0)
if "read-only" in sys.argv:
    native.CodeFolder.problem = "Read-only file system"
if "without thrice" in sys.argv:
    del kernel.KERNELS["ingle_thrice"]
    def entry(x):
        return twice(x)
target = tiers.choose("portable" if "portable" in sys.argv else "auto")
folder = native.CodeFolder(Path(sys.argv[1]), [Path(__file__).with_name("source.py")], target)
print("filled" if folder.holds(kernel.CORE) else "empty", end=" ")
folder.load_kernels()
function = folder.load_function(entry, types.int64(types.int64))
folder.remove_old_versions()
if "read-only" in sys.argv:
    print("loaded" if function.stats.cache_hits else "compiled", end=" ")
print(function(int(sys.argv[2])))
"""

Run = Callable[..., str]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def forks() -> Iterator["subprocess.Popen[str]"]:
    """A process that runs programs in forks; see `program_forks`."""
    command = [sys.executable, "-m", "tests.quant.cpu.program_forks"]
    with Started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        yield process


@pytest.fixture
def run(tmp_path: Path, cache: Path, forks: "subprocess.Popen[str]") -> Run:
    """Run PROGRAM in a separate process, since faulty machine code could crash it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "source.py").write_text("a = 1\n")

    def started(*words: str) -> str:
        output = tmp_path / "output"
        assert forks.stdin is not None
        assert forks.stdout is not None
        print(
            json.dumps([*map(str, (output, tmp_path / "program.py", cache)), "100", *words]),
            file=forks.stdin,
            flush=True,
        )
        status = int(forks.stdout.readline())
        assert status == 0, f"ended by {status}: {output.read_text()}"
        return output.read_text().strip()

    return started


def versions(cache: Path) -> list[Path]:
    return list((cache / "cpu-code").iterdir())


def test_compiled_code_is_read_from_the_folder(run: Run, cache: Path) -> None:
    assert run() == "empty compiled 500"
    (folder,) = versions(cache)
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert {path.suffix for path in kept} >= {".o", ".nbi", ".nbc"}
    assert run() == "filled 500"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == kept


def test_cached_code_is_private_with_umask_zero(run: Run, cache: Path) -> None:
    run("umask 0")
    (folder,) = versions(cache)
    modes = {path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert modes == {True: 0o700, False: 0o600}
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in folder.rglob("*")} == {0}


def test_code_is_read_from_a_read_only_folder(run: Run, cache: Path) -> None:
    run()
    kept = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert run("read-only") == "filled loaded 500"
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == kept


def test_changed_source_gets_a_new_folder(run: Run, cache: Path, tmp_path: Path) -> None:
    run()
    (tmp_path / "source.py").write_text("a = 2\n")
    assert run() == "empty compiled 500"
    assert len(versions(cache)) == 2
    (tmp_path / "source.py").write_text("a = 1\n")
    assert run() == "filled 500"


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        (".o", "cut in half"),
        (".o", "empty"),
        (".o", "a hole"),
        (".nbi", "cut in half"),
        (".nbc", "empty"),
        (".nbc", "a hole"),
    ],
)
def test_damaged_cache_files_are_compiled_again(run: Run, cache: Path, suffix: str, damage: str) -> None:
    """A power failure or a full disk damages files. They must neither crash the process nor stay in the cache."""
    run()
    for path in cache.rglob(f"*{suffix}"):
        whole, half = path.read_bytes(), path.stat().st_size // 2
        hole = whole[: half // 2] + bytes(half) + whole[half // 2 + half :]
        path.write_bytes({"cut in half": whole[:half], "empty": b"", "a hole": hole}[damage])
    for _ in range(2):
        assert run().endswith("500")
    assert run() == "filled 500"


def test_cache_without_a_needed_kernel_is_compiled_again(run: Run) -> None:
    """A process that imported fewer modules compiled fewer kernels."""
    assert run("without thrice") == "empty compiled 200"
    assert run().endswith("500")


def test_kernels_of_several_tiers_share_a_folder(run: Run, cache: Path) -> None:
    """The folder has kernels for each tier. All tiers share the compiled loops."""
    run()
    loops = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")}
    assert run("portable") == "empty compiled 500"
    assert run("portable") == run() == "filled 500"
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")} == loops


def test_process_cannot_load_a_second_tier(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "KERNELS", {})
    monkeypatch.setattr(native, "_engines", {})
    for _ in range(2):
        CodeFolder(cache, [source], TARGET).load_kernels()
    with pytest.raises(RuntimeError, match="another"):
        CodeFolder(cache, [source], replace(TARGET, tier="another")).load_kernels()


def test_concurrent_processes_share_a_folder(tmp_path: Path, cache: Path, run: Run) -> None:
    command = [sys.executable, str(tmp_path / "program.py"), str(cache), "100"]
    started = [Started(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) for _ in range(3)]
    assert all(process.communicate(timeout=HANGING_SECONDS)[0].strip().endswith("500") for process in started)
    assert run() == "filled 500"
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix not in (".o", ".nbi", ".nbc")]


# -- properties of the folder, without compiling code


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.py"
    path.write_text("a = 1\n")
    return path


@pytest.fixture(autouse=True)
def fresh_fingerprints() -> Iterator[None]:
    """Clear the cached fingerprints, because these tests change sources while the process runs."""
    native._fingerprint.cache_clear()
    yield
    native._fingerprint.cache_clear()


def path_of(cache: Path, *sources: Path) -> Path | None:
    native._fingerprint.cache_clear()
    return CodeFolder(cache, sources, TARGET).path


def test_folder_name_depends_on_sources_versions_and_processor(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.py"
    other.write_text("")
    names = [path_of(cache, source), path_of(cache, source, other), path_of(cache, other, source), path_of(cache)]
    source.write_text("a = 2\n")
    names.append(path_of(cache, source))
    for module, name, value in (
        (numba, "__version__", "0.0.1"),
        (llvmlite, "__version__", "0.0.1"),
        (np, "__version__", "0.0.1"),
        (platform, "python_version", lambda: "3.0.0"),
        (binding, "get_host_cpu_name", lambda: "i386"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            names.append(path_of(cache, source))
    assert None not in names
    assert len(set(names)) == len(names)
    assert path_of(cache, source) == names[4]


def test_new_folder_is_private(cache: Path, source: Path) -> None:
    path = path_of(cache, source)
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o702, 0o720, 0o777])
def test_folder_writable_by_others_is_not_used(cache: Path, source: Path, mode: int) -> None:
    path = path_of(cache, source)
    assert path is not None
    path.chmod(mode)
    folder = CodeFolder(cache, [source], TARGET)
    assert folder.path is None
    assert not folder.holds(CORE)
    path.chmod(0o755)
    assert CodeFolder(cache, [source], TARGET).path == path


def test_folder_of_another_user_is_not_used(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert path_of(cache, source) is not None
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert CodeFolder(cache, [source], TARGET).path is None


def test_unusable_cache_path_disables_the_cache(tmp_path: Path, source: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    assert CodeFolder(blocked, [source], TARGET).path is None
    nowhere = CodeFolder(None, [source], TARGET)
    assert nowhere.path is None
    assert not nowhere.holds(CORE)
    nowhere.remove_old_versions()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_problem_says_why_code_cannot_be_saved(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(dir: Path) -> None:  # noqa: A002  # the parameter name of tempfile
        raise OSError(number, os.strerror(number))

    assert CodeFolder(cache, [source], TARGET).problem == ""
    assert CodeFolder(None, [source], TARGET).problem == ""
    (tmp_path / "a file").write_text("")
    assert CodeFolder(tmp_path / "a file", [source], TARGET).problem == "Not a directory"
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    folder = CodeFolder(cache, [source], TARGET)
    assert folder.problem == os.strerror(number)
    folder.remove_old_versions()


def old_version(cache: Path, name: str, age: int) -> Path:
    folder = cache / "cpu-code" / name
    folder.mkdir(parents=True)
    (folder / "kernels.o").write_bytes(b"old")
    os.utime(folder, (1e9 - age, 1e9 - age))
    return folder


def test_remove_old_versions_keeps_the_last_used(cache: Path, source: Path) -> None:
    old = [old_version(cache, f"version {age}", age) for age in range(KEPT + 2)]
    folder = CodeFolder(cache, [source], TARGET)
    folder.remove_old_versions()
    assert {path for path in old if path.exists()} == set(old[: KEPT - 1])
    assert folder.path is not None
    assert folder.path.exists()


def test_version_removed_by_another_process_is_ignored(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of a new version start together, and both remove old versions."""
    gone = old_version(cache, "gone", 5)
    folder, listed = CodeFolder(cache, [source], TARGET), Path.iterdir

    def listing(path: Path) -> list[Path]:
        names = list(listed(path))
        if path == cache / "cpu-code" and gone.exists():
            (gone / "kernels.o").unlink()
            gone.rmdir()
        return names

    monkeypatch.setattr(Path, "iterdir", listing)
    folder.remove_old_versions()
    assert not gone.exists()


def test_kernels_align_the_stack_to_cache_lines() -> None:
    module = ir.Module()
    KERNELS[norm_factor.symbol].emit(module, choose("auto"))  # type: ignore[attr-defined]
    assert "alignstack(64)" in str(module.globals[norm_factor.symbol]).partition("{")[0]  # type: ignore[attr-defined]
