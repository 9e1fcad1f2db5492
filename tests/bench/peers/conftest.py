"""Fixtures for the tests of the peers."""

from pathlib import Path

import pytest

from tests.bench.peers.fake_llama import FakeLlama, make


@pytest.fixture
def fake_llama(tmp_path: Path) -> FakeLlama:
    return make(tmp_path / "llama")
