"""`ingle pull` compiles the kernels of a model for a GPU, and says if the model does not fit it."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.models.load.loaded_model import compile_for_gpu
from app.models.stored_model import StoredModel
from app.progress import SilentProgress
from app.settings.settings import load_settings
from engine.errors import OutOfMemory

STORED = StoredModel("big:70b", Path("big.gguf"), 1, None, "a test", None, None)


@dataclass
class SaidLines(SilentProgress):
    """Keeps the lines that it is to print."""

    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)


def said(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[str]:
    def fail(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr("app.models.load.loaded_model.open_checkpoint", fail)
    progress = SaidLines()
    compile_for_gpu(STORED, load_settings(), progress)
    return progress.lines


def test_model_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = OutOfMemory("The model needs 40.0 GB of GPU memory, but only 23.0 GB are available", "Close programs.")
    assert said(monkeypatch, problem) == [
        "The kernels of big:70b were not compiled for the GPU. "
        "The model needs 40.0 GB of GPU memory, but only 23.0 GB are available."
    ]


def test_other_problems_are_left_to_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, RuntimeError("a driver")) == []
