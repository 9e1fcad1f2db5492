"""Finding a C compiler for Triton, and the errors if there is none."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from triton import knobs
from triton.runtime import build

from engine.backends.cuda import compiler
from engine.backends.cuda.compiler import prepare_compiler
from engine.errors import NoCompiler
from tests.support.guarded import sitecustomize

Script = Callable[[str, str], Path]
WRITES = 'while [ "$1" != -o ]; do shift; done; echo built by "$0" > "$2"'
FAILS = "echo 'trial.c:2:10: fatal error: stdio.h: No such file' >&2; exit 1"


def why_no_compiler() -> str | None:
    """Return the error of `prepare_compiler`, or None."""
    try:
        prepare_compiler()
    except NoCompiler as problem:
        return f"{problem.message}. {problem.remedy}"
    return None


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without compilers: an empty PATH, no ziglang, and an empty Triton cache."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(knobs.build, "impl", None)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """A function that puts a script on PATH."""

    def written(name: str, text: str) -> Path:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return written


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The contents of built modules, in order. No module is loaded, because the scripts do not build real ones."""
    texts: list[str] = []
    monkeypatch.setattr(build, "_load_module_from_path", lambda _, path: texts.append(Path(path).read_text()))
    return texts


def test_missing_compiler_error_has_a_remedy() -> None:
    line = why_no_compiler()
    assert line is not None
    assert "this machine has none" in line
    assert "pipx inject inglenook ziglang" in line
    assert "\n" not in line
    with pytest.raises(NoCompiler):
        prepare_compiler()
    assert knobs.build.impl is None


@pytest.mark.parametrize("name", ["gcc", "clang", "cc"])
def test_compiler_on_path_is_tried_and_used(name: str, script: Script, loaded: list[str]) -> None:
    path = script(name, WRITES)
    prepare_compiler()
    assert loaded == [f"built by {path}\n"]
    build.compile_module_from_src("int other;", "other")
    assert loaded[1:] == [f"built by {path}\n"]


def test_compiler_is_tried_only_once(script: Script, loaded: list[str]) -> None:
    path = script("gcc", WRITES)
    prepare_compiler()
    path.write_text(f"#!/bin/sh\n{FAILS}\n")
    prepare_compiler()
    assert loaded == [f"built by {path}\n"] * 2


def test_compiler_in_cc_comes_first(script: Script, loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script("gcc", FAILS)
    mine = script("mine", f'[ "$1" = --fast ] && {WRITES}')
    monkeypatch.setenv("CC", f"{mine} --fast")
    prepare_compiler()
    assert loaded == [f"built by {mine}\n"]


def test_broken_compiler_is_skipped(script: Script, loaded: list[str]) -> None:
    script("gcc", FAILS)
    clang = script("clang", WRITES)
    prepare_compiler()
    assert loaded == [f"built by {clang}\n"]
    prepare_compiler()  # gcc does not use the cache entry of clang
    assert loaded == [f"built by {clang}\n"] * 2


def test_error_contains_the_compilers_message(script: Script) -> None:
    path = script("gcc", FAILS)
    line = why_no_compiler()
    assert line is not None
    assert f"`{path}`" in line
    assert "stdio.h: No such file" in line
    assert "\n" not in line


def test_module_that_cannot_be_loaded_is_an_error(script: Script) -> None:
    script("gcc", WRITES)
    line = why_no_compiler()
    assert line is not None
    assert "cannot build the module that launches kernels" in line


def test_compiler_that_does_not_exist_is_an_error(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "gone"))
    line = why_no_compiler()
    assert line is not None
    assert "No such file" in line


def test_error_names_missing_python_headers(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script("gcc", WRITES)
    monkeypatch.setattr(compiler, "python_headers", lambda: str(tmp_path))
    line = why_no_compiler()
    assert line is not None
    assert "header files" in line
    assert f"python3.{sys.version_info.minor}-dev" in line


def test_ziglang_package_is_used_as_a_compiler(
    tmp_path: Path, script: Script, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script("gcc", FAILS)
    package = tmp_path / "site" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import sys\nassert sys.argv[1] == 'cc'\nopen(sys.argv[sys.argv.index('-o') + 1], 'w').write('by the package')"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    prepare_compiler()
    assert loaded == ["by the package"]


def test_build_passes_libraries_to_the_compiler(script: Script, tmp_path: Path) -> None:
    script("gcc", f'echo "$@" > {tmp_path}/arguments; {WRITES}')
    (tmp_path / "libknown.so.1").touch()
    folders, libraries = [str(tmp_path)], ["libknown.so.1", "libother.so.1", "m"]
    built = compiler.Compiler(("gcc",)).build("name", "name.c", str(tmp_path), folders, ["/some/where"], libraries)
    assert Path(built).read_text().startswith("built by")
    arguments = (tmp_path / "arguments").read_text().split()
    for expected in ("name.c", "-shared", "-I/some/where", f"-I{tmp_path}", f"-L{tmp_path}"):
        assert expected in arguments
    assert arguments[arguments.index(f"-L{tmp_path}") + 1 :][:3] == [
        f"{tmp_path}/libknown.so.1",
        "-l:libother.so.1",
        "-lm",
    ]


def test_cached_launcher_needs_no_compiler(
    tmp_path: Path, script: Script, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    driver = Path(triton.__file__).with_name("backends") / "nvidia" / "driver.c"
    path = script("gcc", WRITES)
    prepare_compiler()
    build.compile_module_from_src(driver.read_text(), "cuda_utils")
    path.unlink()
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    assert why_no_compiler() is None
    monkeypatch.setattr(triton, "__version__", "3.6.0")  # before Triton 3.7, each kernel has its own launcher
    assert why_no_compiler() is not None


@pytest.mark.slow
def test_ziglang_builds_a_loadable_module(tmp_path: Path) -> None:
    """This test is slow: the package takes hundreds of megabytes unpacked."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), "ziglang"]
    with sitecustomize.lifted():
        subprocess.run(install, check=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), *sys.path)), "HOME": str(tmp_path)}
    code = (
        "from engine.backends.cuda.compiler import prepare_compiler; prepare_compiler()\n"
        "from triton.runtime.build import compile_module_from_src as build\n"
        "from engine.backends.cuda.compiler import SOURCE; print(build(SOURCE, 'inglenook_trial'))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "inglenook_trial" in done.stdout
