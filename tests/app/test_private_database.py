"""SQLite files that only their owner can read."""

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from app.private_database import PrivateDatabase, make_private

SCHEMA = "CREATE TABLE IF NOT EXISTS things (name TEXT);"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "things.sqlite"


@pytest.fixture
def database(path: Path) -> Iterator[PrivateDatabase]:
    with closing(PrivateDatabase(path, SCHEMA, 1, 5.0)) as database:
        yield database


def test_new_file_is_private_and_existing_file_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.sqlite"
    make_private(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_bytes(b"content")
    make_private(file)
    assert file.read_bytes() == b"content"


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_pipe_or_folder_is_refused(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path / "a.sqlite")
    with pytest.raises(OSError, match="is not a regular file"):
        make_private(tmp_path / "a.sqlite")


def test_first_write_creates_the_file(database: PrivateDatabase, path: Path) -> None:
    assert database.readable() is None
    assert not path.parent.exists()
    with database.writable() as connection:
        connection.execute("INSERT INTO things VALUES ('a')")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    database.close()
    assert database.writable().execute("SELECT name FROM things").fetchall() == [("a",)]


def test_reader_cannot_write(database: PrivateDatabase, path: Path) -> None:
    database.writable()
    with closing(PrivateDatabase(path, SCHEMA, 1, 5.0)) as reader:
        connection = reader.readable()
        assert connection is not None
        assert connection.execute("SELECT name FROM things").fetchall() == []
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("INSERT INTO things VALUES ('a')")


def test_empty_file_is_not_read(database: PrivateDatabase, path: Path) -> None:
    path.parent.mkdir()
    make_private(path)
    assert database.readable() is None


def test_file_of_another_version_is_refused_and_kept(database: PrivateDatabase, path: Path) -> None:
    database.writable()
    with closing(PrivateDatabase(path, SCHEMA, 2, 5.0)) as other, pytest.raises(sqlite3.DatabaseError, match="version"):
        other.writable()
    assert database.writable().execute("PRAGMA user_version").fetchone() == (1,)


def test_database_without_a_path_is_in_memory() -> None:
    with closing(PrivateDatabase(None, SCHEMA, 1, 5.0)) as database:
        assert database.readable() is None
        assert database.writable().execute("SELECT name FROM things").fetchall() == []
