"""What a person is told while a model is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.models.kernel_preparation import loading
from app.models.stored_model import StoredModel
from app.progress import Report, Unit


class Listed:
    """What would be told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        self.lines.append(f"{label} {total}")
        yield lambda done: self.lines.append(str(done))
        self.lines.append("done")

    def say(self, line: str) -> None:
        raise AssertionError(line)


def test_what_follows_the_reading_has_a_line_of_its_own(tmp_path: Path) -> None:
    progress = Listed()
    with loading(StoredModel("it", tmp_path, 30, None, "", None, None), progress) as report:
        report(10, 20)
        report(20, 20)
        assert progress.lines == ["Loading it 30", "10", "20", "done", "Preparing it for this machine None"]
    assert progress.lines[-1] == "done"
