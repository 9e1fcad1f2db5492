"""ARCHITECTURE.md names every file there is, and no other; the commands that people copy are the ones that CI runs."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("app", "engine", "quant", "tui", "packaging")


def tree_of_the_page() -> set[str]:
    """The paths of the page's tree: a folder's line ends in a slash and its files are indented below it."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    paths, folders = set(), [""]
    for line in page.split("```")[1].splitlines():
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, meaning = line.strip().partition(" ")
        assert meaning.strip(), f"{name} has no line of its own"
        del folders[depth + 1 :]
        if name.endswith("/"):
            folders.append(folders[-1] + name)
        else:
            paths.add(folders[-1] + name)
    return paths


def tree_of_the_checkout() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    there = {name for name in listed.stdout.split("\n") if name and (ROOT / name).exists()}
    return {name for name in there if Path(name).name != "__init__.py"}


def test_the_tree_is_true() -> None:
    page = {path for path in tree_of_the_page() if path.startswith(FOLDERS)}
    assert page == tree_of_the_checkout()


def test_every_module_states_its_contract() -> None:
    for name in tree_of_the_checkout():
        if name.endswith(".py"):
            source = (ROOT / name).read_text(encoding="utf-8")
            assert source.startswith('"""'), f"{name} does not open with a docstring"


def test_ci_runs_the_readmes_test_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^ *(pip install .*)$", readme, re.MULTILINE)
    assert commands[0].startswith("pip install . && ingle run ")
    assert commands[1] in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()


def test_no_package_in_the_folders_that_must_not_be_one() -> None:
    """An __init__.py there would hide the `packaging` library, or make the tests importable under another name."""
    for folder in ("packaging", "tests"):
        assert not list((ROOT / folder).rglob("__init__.py"))
