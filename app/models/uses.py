"""When each model was loaded last: the time of a small file of its own, for people who need room.

Nothing depends on it. Refuses to know what a model is used for.
"""

import hashlib
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from app.models.stored_model import StoredModel
from engine.private_folder import private_folder

_FOLDER = ".used"


def note_use(stored: StoredModel, models_dir: Path) -> None:
    """The model is used now."""
    with suppress(OSError):  # a folder that cannot be written to keeps no one from loading
        private_folder(models_dir / _FOLDER)
        _stamp(stored, models_dir).touch()


def last_use(stored: StoredModel, models_dir: Path) -> str | None:
    """ISO 8601 in UTC; None where it was never loaded."""
    try:
        seconds = _stamp(stored, models_dir).stat().st_mtime
    except OSError:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _stamp(stored: StoredModel, models_dir: Path) -> Path:
    """By its path: names change, and paths can be long."""
    return models_dir / _FOLDER / hashlib.sha256(os.fsencode(stored.path.absolute())).hexdigest()[:32]
