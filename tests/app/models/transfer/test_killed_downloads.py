"""Downloads that are killed at random bytes. tests/torture/killed_downloads.py runs more of these rounds."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.torture.killed_downloads import Downloader, hub_and_storage, run_round


@pytest.fixture
def downloader() -> Iterator[Downloader]:
    process = Downloader()
    yield process
    process.close()


def test_killed_download_resumes_until_it_is_complete(
    downloader: Downloader, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    random = Random(request.config.option.seed)
    with hub_and_storage() as hubs:
        done = run_round(downloader, hubs, tmp_path, random, kills=2, size=500_000)
        assert (done.is_finished, done.is_intact, done.is_loadable_early) == (True, True, False), done
        assert not any(headers["Authorization"] for _, _, headers in hubs[1].requests)
        assert any(headers["Authorization"] for _, _, headers in hubs[0].requests)
