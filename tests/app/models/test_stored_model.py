"""The names by which requests refer to stored models."""

from pathlib import Path

import pytest

from app.models.stored_model import LOCAL_FILE, LOCAL_FOLDER, StoredModel


def stored(name: str, path: Path, source: str) -> StoredModel:
    return StoredModel(name, path, 0, None, source, None, None)


@pytest.mark.parametrize(
    ("file", "served"),
    [
        ("x.gguf", "x"),
        ("Qwen3-4B.Q4_K_M.gguf", "Qwen3-4B.Q4_K_M"),
        ("big-00001-of-00003.gguf", "big"),
        ("a b.GGUF", "a b"),
    ],
)
def test_file_is_served_under_its_stem(tmp_path: Path, file: str, served: str) -> None:
    for path in (tmp_path / file, Path("..") / file):
        assert stored(f"./{file}", path, LOCAL_FILE).served_name == served


def test_folder_is_served_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my.model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for path in (folder, Path(), folder / "..", Path("..") / "my.model"):
        expected = tmp_path.name if path.name == ".." else "my.model"
        assert stored(str(path), path, LOCAL_FOLDER).served_name == expected


def test_other_models_are_served_under_their_names(tmp_path: Path) -> None:
    assert stored("org/repo:Q4_0", tmp_path / "x.gguf", "Hugging Face").served_name == "org/repo:Q4_0"
