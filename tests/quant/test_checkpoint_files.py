import os
from pathlib import Path

import pytest

import quant.checkpoint_files
from quant.checkpoint_files import read_bytes, read_object, read_text
from quant.errors import ModelFileError


def test_bytes_text_and_objects_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"é": [1, null]}')
    assert read_object(tmp_path, "a.json") == {"é": [1, None]}
    assert read_text(tmp_path, "a.json") == '{"é": [1, null]}'
    assert read_bytes(tmp_path, "a.json") == '{"é": [1, null]}'.encode()


def test_missing_file_returns_none(tmp_path: Path) -> None:
    assert [read(tmp_path, "a.json") for read in (read_bytes, read_text, read_object)] == [None] * 3


def test_link_in_the_hugging_face_cache_is_followed(tmp_path: Path) -> None:
    snapshot, blob = tmp_path / "models--o--r" / "snapshots" / "0123", tmp_path / "models--o--r" / "blobs" / "abc"
    snapshot.mkdir(parents=True)
    blob.parent.mkdir()
    blob.write_text("text")
    (snapshot / "a.txt").symlink_to(os.path.relpath(blob, snapshot))
    assert read_text(snapshot, "a.txt") == "text"


@pytest.mark.parametrize("target", ["/etc/hostname", "../outside", "nothing"])
def test_link_out_of_the_folder_is_rejected(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside").write_text("{}")
    (folder / "a.json").symlink_to(target)
    with pytest.raises(ModelFileError, match="outside of"):
        read_object(folder, "a.json")


def test_subfolder_linked_out_of_the_folder_is_rejected(tmp_path: Path) -> None:
    for name in ("model", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside" / "a.json").write_text("{}")
    (tmp_path / "model" / "inner").symlink_to("../outside")
    with pytest.raises(ModelFileError, match="outside of"):
        read_object(tmp_path / "model", "inner/a.json")


@pytest.mark.parametrize(("raw", "words"), [(b"\xff", "UTF-8"), (b"[]", "not an object"), (b"{", "not JSON")])
def test_malformed_content_error_names_the_file(tmp_path: Path, raw: bytes, words: str) -> None:
    (tmp_path / "a.json").write_bytes(raw)
    with pytest.raises(ModelFileError, match=words) as caught:
        read_object(tmp_path, "a.json")
    assert str(tmp_path / "a.json") in caught.value.message


def test_text_must_be_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match="UTF-8"):
        read_text(tmp_path, "a.txt")


def test_file_over_the_size_limit_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant.checkpoint_files, "MAX_BYTES", 3)
    (tmp_path / "a").write_bytes(b"abc")
    assert read_bytes(tmp_path, "a") == b"abc"
    (tmp_path / "a").write_bytes(b"abcd")
    with pytest.raises(ModelFileError, match="4 bytes, over the limit of 3"):
        read_bytes(tmp_path, "a")


def test_non_regular_file_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_bytes(tmp_path, "a")
