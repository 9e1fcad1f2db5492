"""Some cases of tests/torture/damaged_histories.py."""

from pathlib import Path

import pytest

from tests.torture.damaged_histories import HARMS, SHAPES, Sound, case, sound


@pytest.fixture(scope="module", params=SHAPES, ids=["file", "file and log", "log"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    return sound(tmp_path_factory.mktemp("sound"), request.param)


@pytest.mark.parametrize("number", range(100))
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.share(2, "source", "harm")
def test_damaged_histories_open_and_report_losses(source: Sound, tmp_path: Path, harm: str, number: int) -> None:
    with case(source, tmp_path, HARMS[harm], number) as (done, outcome):
        assert (outcome.opens, outcome.opens_again, outcome.untold) == (True, True, ""), done
