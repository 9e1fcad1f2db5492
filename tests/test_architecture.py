"""ARCHITECTURE.md lists every folder, every module has a docstring, and `packaging` and `tests` have no __init__.py."""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("app", "engine", "quant", "tui", "packaging")


def folders_of_the_page() -> list[str]:
    """Return the folders in the first code block of the page, in order. Each line has a folder and its purpose."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    lines = [line.split(None, 1) for line in page.split("```")[1].splitlines() if line.strip()]
    assert all(len(line) == 2 for line in lines), "a folder has no description"
    return [folder for folder, _ in lines]


def files_of_the_checkout() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    there = {name for name in listed.stdout.split("\n") if name and (ROOT / name).exists()}
    return {name for name in there if Path(name).name != "__init__.py"}


def test_page_lists_every_folder() -> None:
    folders = {f"{Path(name).parent}/" for name in files_of_the_checkout() if name.endswith(".py")}
    listed = folders_of_the_page()
    assert sorted(listed) == sorted(folders)


def test_every_module_has_a_docstring() -> None:
    for name in files_of_the_checkout():
        if name.endswith(".py"):
            assert ast.get_docstring(ast.parse((ROOT / name).read_text(encoding="utf-8"))), f"{name} has no docstring"


def test_packaging_and_tests_are_not_packages() -> None:
    """An __init__.py there would hide the `packaging` library, or make the tests importable under another name."""
    for folder in ("packaging", "tests"):
        assert not list((ROOT / folder).rglob("__init__.py"))
