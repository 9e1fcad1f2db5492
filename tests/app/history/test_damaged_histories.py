"""A few cases of tests/torture/damaged_histories.py, as regular tests."""

from pathlib import Path

import pytest

from tests.torture.damaged_histories import DAMAGES, SHAPES, IntactHistory, case, intact_history


@pytest.fixture(scope="module", params=SHAPES, ids=["file", "file and log", "log"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> IntactHistory:
    return intact_history(tmp_path_factory.mktemp("sound"), request.param)


@pytest.mark.parametrize("number", range(100))
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.share(2, "source", "damage")
def test_damaged_histories_open_and_report_losses(
    source: IntactHistory, tmp_path: Path, damage: str, number: int
) -> None:
    with case(source, tmp_path, DAMAGES[damage], number) as (description, outcome):
        assert (outcome.opens, outcome.opens_again, outcome.unreported) == (True, True, ""), description
