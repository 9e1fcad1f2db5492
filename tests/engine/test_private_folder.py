"""Folders that only their user can access."""

import os
import stat
from pathlib import Path

import pytest

from engine.private_folder import private_folder


@pytest.mark.parametrize("mask", [0, 0o022, 0o377, 0o777])
def test_private_folders_have_mode_0700_under_any_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        folder = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert folder == tmp_path / "a" / "b"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]


def test_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert private_folder(tmp_path) == tmp_path
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
