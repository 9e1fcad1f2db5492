"""ARCHITECTURE.md lists every folder, and the commands that people copy are the ones that CI runs."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("app", "engine", "quant", "tui", "packaging")


def rooms_of_the_page() -> list[str]:
    """The folders of the page's first block, in their order: each line has the path of one and what it holds."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    lines = [line.split(None, 1) for line in page.split("```")[1].splitlines() if line.strip()]
    assert all(len(line) == 2 for line in lines), "each folder has a meaning"
    return [folder for folder, _ in lines]


def files_of_the_checkout() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    there = {name for name in listed.stdout.split("\n") if name and (ROOT / name).exists()}
    return {name for name in there if Path(name).name != "__init__.py"}


def test_the_page_lists_every_folder() -> None:
    folders = {f"{Path(name).parent}/" for name in files_of_the_checkout() if name.endswith(".py")}
    listed = rooms_of_the_page()
    assert sorted(listed) == sorted(folders)


def test_every_module_states_its_contract() -> None:
    for name in files_of_the_checkout():
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
