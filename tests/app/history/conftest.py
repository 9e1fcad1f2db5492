"""Fixtures of chat histories, which are created once per run and copied for each test."""

import shutil
from pathlib import Path

import pytest

from app.history.database import FILE_NAME
from tests.app.history import damage


@pytest.fixture(scope="session")
def _filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    damage.filled(folder)
    return folder


@pytest.fixture(scope="session")
def _logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logged")
    damage.logged(folder)
    return folder


@pytest.fixture
def filled(_filled: Path, tmp_path: Path) -> Path:
    """The path of a history in `tmp_path` whose chats are all in the database file."""
    shutil.copytree(_filled, tmp_path, dirs_exist_ok=True)
    return tmp_path / FILE_NAME


@pytest.fixture
def logged(_logged: Path, tmp_path: Path) -> Path:
    """The path of a history in `tmp_path`. Half of its chats are only in the log, whose index is missing."""
    shutil.copytree(_logged, tmp_path, dirs_exist_ok=True, ignore=lambda folder, names: [damage.INDEX])
    return tmp_path / FILE_NAME


@pytest.fixture
def logged_and_indexed(_logged: Path, tmp_path: Path) -> Path:
    """The path of a history in `tmp_path`. Half of its chats are only in the log, whose index exists."""
    shutil.copytree(_logged, tmp_path, dirs_exist_ok=True)
    return tmp_path / FILE_NAME
