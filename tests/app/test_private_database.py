"""SQLite files of the user's own."""

import os
import stat
from pathlib import Path

import pytest

from app.private_database import make_private


def test_a_new_file_is_for_its_owner_alone_and_an_old_one_stays(tmp_path: Path) -> None:
    file = tmp_path / "a.sqlite"
    make_private(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_bytes(b"content")
    make_private(file)
    assert file.read_bytes() == b"content"


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_a_pipe_or_a_folder_is_refused(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path / "a.sqlite")
    with pytest.raises(OSError, match="is no file"):
        make_private(tmp_path / "a.sqlite")
