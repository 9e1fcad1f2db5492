"""Tests for the suggested names of code files."""

from pathlib import Path

import pytest

from tui.code_files import suggested_name


@pytest.mark.parametrize(
    ("language", "name"),
    [("python", "snippet.py"), ("Rust", "snippet.rs"), ("js title=x", "snippet.js"), ("", "snippet.txt"),
     ("dockerfile", "Dockerfile")],
)  # fmt: skip
def test_file_name_has_the_extension_of_the_language(language: str, name: str, tmp_path: Path) -> None:
    assert suggested_name(language, tmp_path) == name


def test_suggested_name_skips_existing_files(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").touch()
    (tmp_path / "snippet-2.py").touch()
    assert suggested_name("python", tmp_path) == "snippet-3.py"
