"""The time of the last use of a model is recorded when it is loaded."""

from datetime import UTC, datetime
from pathlib import Path

from app.models.stored_model import last_use, record_use, stored_model


def test_last_use_is_recorded_per_model(tmp_path: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    for path in (one, other):
        path.touch()
    used, unused = (stored_model(path.name, path, "local file") for path in (one, other))
    before = datetime.now(UTC).replace(microsecond=0)
    record_use(used, tmp_path / "models")
    moment = last_use(used, tmp_path / "models")
    assert moment is not None
    assert before <= datetime.fromisoformat(moment) <= datetime.now(UTC)
    assert last_use(unused, tmp_path / "models") is None


def test_unwritable_folder_records_no_use(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    path.touch()
    # fails, because the parent of this path is a file
    record_use(stored_model("one", path, "local file"), path / "models")
    assert last_use(stored_model("one", path, "local file"), path / "models") is None
