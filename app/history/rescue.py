"""Move a damaged history aside and replace it with a new one that contains everything readable.

Files are replaced only while no other process has them open, because SQLite removes a log by its file name. If the
program is killed, the next start finds either the old files or the complete new one.
"""

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path

from app.history.files import read_start, wal_path
from app.history.integrity import too_new_error
from app.history.notices import Rescue, rescue_of
from app.history.pages import MalformedRow, read_pages, row_at, table_cells
from app.history.refill import refill
from app.history.salvage import salvage
from app.history.schema import VERSION
from app.private_database import fold_log

_SUFFIXES = ("", "-wal")


def rescue(path: Path, reason: str, create: Callable[[Path], sqlite3.Connection]) -> Rescue:
    """Replace the damaged history at `path`. `reason`: the damage. `create` creates an empty history.

    Raises HistoryTooNew, sqlite3.Error, or OSError; the files are then unchanged.
    """
    refuse_newer(path)
    salvaged = salvage(path)
    fresh = path.with_suffix(".fresh")
    _remove(fresh)
    aside = _put_aside(path)
    try:
        with closing(create(fresh)) as connection:
            saved = refill(connection, salvaged)
            fold_log(connection)
        os.replace(fresh, _complete(path))
    except BaseException:
        for file in (fresh, aside):
            _remove(file)
        raise
    finish_replacement(path)
    return rescue_of(reason, aside if aside.exists() else wal_path(aside), salvaged, saved)


def finish_replacement(path: Path) -> None:
    """Replace the old history with the complete new one, unless that has already happened."""
    complete = _complete(path)
    if complete.exists():
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        os.replace(complete, path)


def refuse_newer(path: Path) -> None:
    """Raise HistoryTooNew if a newer program wrote the history, because its tables are unknown here."""
    stated = int.from_bytes(read_start(path, 64)[60:], "big")
    pages = read_pages(path) if stated > VERSION else []
    for number, page in enumerate(pages):
        for offset in table_cells(page, number):
            with suppress(MalformedRow):
                if row_at(pages, page, offset)[1] == (stated,):  # a row of the table `about`
                    raise too_new_error(stated)


def _complete(path: Path) -> Path:
    return path.with_suffix(".rescued")


def _put_aside(path: Path) -> Path:
    """Link the file and its log to additional names, or copy them if the file system has no links."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    aside = path.with_name(f"{path.stem}-damaged-{stamp}{path.suffix}")
    for suffix in _SUFFIXES:
        old, new = f"{path}{suffix}", f"{aside}{suffix}"
        if not os.path.exists(old):
            continue
        try:
            os.link(old, new)
        except OSError:
            shutil.copy2(old, new)
    return aside


def _remove(path: Path) -> None:
    for suffix in (*_SUFFIXES, "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
