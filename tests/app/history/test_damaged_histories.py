"""A share of the damaged histories that tests/damaged_histories.py makes."""

from pathlib import Path

import pytest

from tests.damaged_histories import SHAPES, Sound, case, sound


@pytest.fixture(scope="module", params=SHAPES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    return sound(tmp_path_factory.mktemp("sound"), request.param)


@pytest.mark.parametrize("number", range(200))
@pytest.mark.share(3, "source")
def test_damaged_histories_open_and_tell_what_they_lost(source: Sound, tmp_path: Path, number: int) -> None:
    with case(source, tmp_path, number) as (harm, outcome):
        assert (outcome.opens, outcome.opens_again, outcome.untold) == (True, True, ""), harm
