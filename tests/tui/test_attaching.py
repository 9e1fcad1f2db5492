"""Tests for attaching files."""

from pathlib import Path

import pytest

from tui.client import ClientError
from tui.drafts import LARGEST, dropped_path, read_attachment


def test_text_file_becomes_an_attachment(tmp_path: Path) -> None:
    path = tmp_path / "a file.py"
    path.write_text("\ufeffprint('é')\n", encoding="utf-8")
    found = read_attachment(path)
    assert (found.name, found.text) == ("a file.py", "print('é')\n")


def test_refusal_says_what_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF\0" + b"x" * LARGEST)
    (tmp_path / "long.txt").write_bytes(b"x" * (LARGEST + 1))
    reasons = {}
    for name in ("", "a.pdf", "long.txt"):
        with pytest.raises(ClientError) as refused:
            read_attachment(tmp_path / name)
        reasons[name] = refused.value.sentences
    assert reasons == {
        "": f"{tmp_path} is a folder. Attach its files.",
        "a.pdf": "a.pdf is not a text file. Only text files can be attached.",
        "long.txt": "long.txt is larger than 2 MB. Attach only the part that you need.",
    }


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"text\0more", b"x" * (LARGEST + 1), None])
def test_files_that_are_not_text_are_rejected(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "file"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ClientError) as refused:
        read_attachment(path)
    assert refused.value.remedy


def test_pasted_file_path_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "a file.txt"
    path.write_text("x")
    escaped = str(path).replace(" ", "\\ ")
    for pasted in (str(path), f"'{path}'", escaped, f"file://{path} \n"):
        assert dropped_path(pasted) == path
    for pasted in ("a file.txt", f"{path}\nmore", str(tmp_path), "/no/such/file", "/" * 5000):
        assert dropped_path(pasted) is None
