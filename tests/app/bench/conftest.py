"""What tests of the benchmark share."""

from pathlib import Path

import pytest

from tests.app.bench.fake_llama import FakeLlama, make


@pytest.fixture
def fake_llama(tmp_path: Path) -> FakeLlama:
    return make(tmp_path / "llama")
