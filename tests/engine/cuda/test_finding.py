"""Why a GPU cannot be used is told in a line, with what to do about it."""

import pytest
import torch

from engine.cuda import finding
from engine.cuda.finding import Unusable, find_gpu
from engine.errors import NoCompiler


def test_a_gpu_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NoCompiler("there is no compiler", "Get one.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(finding, "prepare_compiler", none)
    find_gpu.cache_clear()
    found = find_gpu()
    find_gpu.cache_clear()
    assert found == Unusable("there is no compiler", "Get one.")
