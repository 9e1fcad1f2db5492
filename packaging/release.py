"""Build, check, and render everything that a release publishes, into one folder. Publishes nothing.

    python packaging/release.py --model MODEL.gguf --repository https://github.com/OWNER/inglenook

`--step` runs some of the steps, in the order of STEPS. Names, versions, and descriptions come from the metadata of the
wheel, and hashes from the built files. Needs `pip install ".[release]"`.
"""

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from functools import cached_property
from importlib.resources import files
from pathlib import Path

import click
import jinja2

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

# Packages other than torch, for environments that get a build of torch for CPUs from PyTorch's index.
WITHOUT_TORCH = "torch ; sys_platform == 'never'\n"
LOCKS: Mapping[str, str] = {"requirements.txt": "", "requirements-cpu.txt": WITHOUT_TORCH}
ICON = ROOT / "app/server/page/icon.svg"  # the icon of the server's page
SHIPPED = ("app", "engine", "quant", "tui")
AUR_FILES = ("*.whl", "requirements.txt", "ingle.1", "inglenook.desktop", "inglenook.svg")
SDIST_CONTAINS = ("pyproject.toml", "README.md", "LICENSE", "packaging/release.py", "tests/conftest.py")
PROMPT = "What is the capital of France?"

# Rendered file: template, and the values that only this file uses.
RENDERED: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "inglenook.desktop": ("desktop/inglenook.desktop.j2", {}),
    "Dockerfile.cpu": ("docker/Dockerfile.j2", {"cuda": False, "lock": "requirements-cpu.txt"}),
    "Dockerfile.cuda": ("docker/Dockerfile.j2", {"cuda": True, "lock": "requirements.txt"}),
    "homebrew/inglenook.rb": ("homebrew/inglenook.rb.j2", {}),
    "winget/Inglenook.Inglenook.yaml": ("winget/version.yaml.j2", {}),
    "winget/Inglenook.Inglenook.installer.yaml": ("winget/installer.yaml.j2", {}),
    "winget/Inglenook.Inglenook.locale.en-US.yaml": ("winget/locale.en-US.yaml.j2", {}),
    "aur/PKGBUILD": ("aur/PKGBUILD.j2", {}),  # these two last: they contain the hash of the desktop file
    "aur/.SRCINFO": ("aur/SRCINFO.j2", {}),
}


def run(*command: str | Path, **environment: str) -> str:
    """Run a command outside of the checkout's import path. Returns its standard output; raises if it fails."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    click.echo(f"  $ {' '.join(words)}", err=True)
    done = subprocess.run(
        words, cwd=ROOT, env=kept | environment, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=False
    )
    if done.returncode != 0:
        raise click.ClickException(f"{Path(command[0]).name} ended with status {done.returncode}")
    return done.stdout


def python(*arguments: str | Path) -> str:
    return run(sys.executable, *arguments)


def expect(condition: object, problem: str) -> None:
    if not condition:
        raise click.ClickException(problem)


@dataclass(frozen=True)
class Published:
    """A file of the release, its address, and its hash."""

    path: Path
    url: str

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Release:
    """The folder of a release, and what its files say about themselves."""

    folder: Path
    repository: str
    model: Path | None

    def only(self, pattern: str) -> Path:
        found = sorted(self.folder.glob(pattern))
        expect(len(found) == 1, f"{self.folder} has {len(found)} files {pattern}, not one: run the earlier steps")
        return found[0]

    @cached_property
    def metadata(self) -> Message:
        with zipfile.ZipFile(self.only("*.whl")) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return Parser().parsestr(wheel.read(name).decode())

    def field(self, name: str) -> str:
        value = self.metadata[name]
        expect(value, f"the wheel has no {name}")
        return str(value)

    @property
    def version(self) -> str:
        return self.field("Version")

    def published(self, name: str) -> Published:
        path = self.only(name)
        return Published(path, f"{self.repository}/releases/download/v{self.version}/{path.name}")

    def values(self) -> dict[str, object]:
        """Return the values of all templates."""
        limits = dict(re.findall(r"(>=|<)([\d.]+)", self.field("Requires-Python")))
        torch = re.search(r"^torch==(\S+)", self.only("requirements.txt").read_text(), re.MULTILINE)
        expect(torch, "requirements.txt has no version of torch")
        return {
            "name": self.field("Name"),
            "version": self.version,
            "description": self.field("Summary"),
            "license": self.field("License-Expression"),
            "repository": self.repository,
            "python_from": f">={limits['>=']}",
            "python_below": f"<{limits['<']}",
            "torch": torch[1] if torch else "",
            "wheel": self.published("*.whl"),
            "requirements": self.published("requirements.txt"),
            "manual": self.published("ingle.1"),
            "windows": self.published("*-windows.zip"),
        }


def build(release: Release) -> None:
    """Build the sdist, and the wheel from the sdist."""
    shutil.rmtree(release.folder, ignore_errors=True)
    python("-m", "build", "--outdir", release.folder, ROOT)


def check(release: Release) -> None:
    """Check the contents and the metadata of the wheel and the sdist."""
    wheel, sdist = release.only("*.whl"), release.only("*.tar.gz")
    python("-m", "twine", "check", "--strict", wheel, sdist)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    expect(release.version == declared["version"], f"the wheel has version {release.version}")
    tracked = run("git", "ls-files", *SHIPPED).splitlines()
    with zipfile.ZipFile(wheel) as archive:
        packed = {name.removeprefix("inglenook/") for name in archive.namelist()}
    expect(not (missing := set(tracked) - packed), f"the wheel lacks {sorted(missing)}")
    extra = {name for name in packed - set(tracked) if ".dist-info/" not in name} - {"__init__.py", "__main__.py"}
    expect(not extra, f"the wheel contains files that are not tracked: {sorted(extra)}")
    with tarfile.open(sdist) as sources:
        unpacked = {name.partition("/")[2] for name in sources.getnames()}
    expect(not (missing := set(SDIST_CONTAINS) - unpacked), f"the sdist lacks {sorted(missing)}")


def lock(release: Release) -> None:
    """Write the versions and hashes of all dependencies, for every platform and version of Python."""
    for name, override in LOCKS.items():
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
            overrides.write(override)
            overrides.flush()
            python(
                "-m", "uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header",
                "--python-version", release.field("Requires-Python").partition(">=")[2].partition(",")[0],
                "--override", overrides.name, "--output-file", release.folder / name, "pyproject.toml",
            )  # fmt: skip


def smoke(release: Release) -> None:
    """Install the wheel into a new environment, run it, and list the contents of the environment as an SBOM."""
    expect(release.model, "this step needs --model")
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "environment")
        python("-m", "venv", environment)
        bin_folder = environment / ("Scripts" if os.name == "nt" else "bin")
        run(bin_folder / "python", "-m", "pip", "install", "--quiet", release.only("*.whl"))
        homes = {f"INGLE_{name}_DIR": str(Path(folder, name.lower())) for name in ("STATE", "CACHE", "MODELS")}
        ingle, settings = bin_folder / "ingle", homes | {"INGLE_OFFLINE": "1"}
        expect(run(ingle, "--version") == f"ingle {release.version}\n", "the installed program has another version")
        click.echo(run(ingle, "doctor", **settings), err=True)
        reply = run(ingle, "run", PROMPT, "--once", "--seed", "1", "--model", str(release.model), **settings)
        expect("Paris" in reply, f"the reply to {PROMPT!r} is {reply!r}")
        python(
            "-m", "cyclonedx_py", "environment", "--pyproject", "pyproject.toml", "--output-reproducible",
            "--output-file", release.folder / f"inglenook-{release.version}.cdx.json", bin_folder / "python",
        )  # fmt: skip


def share(release: Release) -> None:
    """Write the man page and the icon."""
    shutil.copy(ICON, release.folder / "inglenook.svg")
    date = run("git", "log", "-1", "--format=%cs").strip()
    (release.folder / "ingle.1").write_text(python(HERE / "man_page.py", release.version, date), encoding="utf-8")


def windows(release: Release) -> None:
    """Write the zip for Windows: a launcher that installs the wheel into a new environment on its first start."""
    program = io.BytesIO()
    with zipfile.ZipFile(program, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (HERE / "windows/__main__.py", release.only("*.whl"), release.only("requirements.txt")):
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes())
    launcher = files("distlib").joinpath("t64.exe").read_bytes()
    with zipfile.ZipFile(release.folder / f"ingle-{release.version}-windows.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        executable = launcher + b"#!/usr/bin/env python.exe\r\n" + program.getvalue()
        archive.writestr(zipfile.ZipInfo("ingle.exe"), executable)


def render(release: Release) -> None:
    """Render all templates."""
    loader = jinja2.FileSystemLoader(HERE)
    environment = jinja2.Environment(  # noqa: S701  # none of the files is HTML
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    expect(release.repository, "this step needs --repository")
    values = release.values()
    for name, (template, own) in RENDERED.items():
        path = release.folder / name
        path.parent.mkdir(exist_ok=True)
        if name.startswith("aur/"):
            values["aur_files"] = [release.published(source) for source in AUR_FILES]
        path.write_text(environment.get_template(template).render(values, dockerfile=name, **own), encoding="utf-8")


def summary(release: Release) -> None:
    """List the files of the release with their sizes and hashes, and write SHA256SUMS."""
    sums = release.folder / "SHA256SUMS"
    published = [path for path in sorted(release.folder.iterdir()) if path.is_file() and path != sums]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in published]
    sums.write_text("\n".join([*lines, ""]), encoding="utf-8")
    click.echo(f"Files of release {release.version}:")
    for path, line in zip(published, lines, strict=True):
        click.echo(f"  {path.stat().st_size:>10,}  {line}")
    for folder in sorted(path for path in release.folder.iterdir() if path.is_dir()):
        click.echo(f"Files for {folder.name}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    click.echo("Nothing was published.")


STEPS: Sequence[Callable[[Release], None]] = (build, check, lock, smoke, share, windows, render, summary)


@click.command(help=__doc__)
@click.option(
    "--model", type=click.Path(exists=True, path_type=Path), help="GGUF file of the small model, for a reply."
)
@click.option("--repository", default="", help="Address of the project. The files are attached to its release.")
@click.option("--folder", type=click.Path(path_type=Path), default=ROOT / "dist", help="Folder of the files.")
@click.option(
    "--step", "names", multiple=True, type=click.Choice([step.__name__ for step in STEPS]), help="Default: all."
)
def main(model: Path | None, repository: str, folder: Path, names: tuple[str, ...]) -> None:
    release = Release(folder.resolve(), repository.rstrip("/"), model.resolve() if model else None)
    for step in STEPS:
        if not names or step.__name__ in names:
            click.echo(f"{step.__name__}: {step.__doc__}", err=True)
            step(release)


if __name__ == "__main__":
    main()
