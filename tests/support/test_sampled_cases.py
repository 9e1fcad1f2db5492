"""The sampling of test cases, in separate runs of pytest."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
from tests.support import sampled_cases

pytest_addoption = sampled_cases.add_options
pytest_configure = sampled_cases.choose_seed
pytest_collection_modifyitems = sampled_cases.sample
"""
TESTS = """
import pytest

@pytest.mark.share(2, "name")
@pytest.mark.parametrize("size", range(20))
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_many(name, size): pass

@pytest.mark.parametrize("size", range(5))
def test_few(size): pass

@pytest.mark.share(3)
@pytest.mark.parametrize("size", range(20))
def test_one(size): pass

@pytest.mark.share(3)
@pytest.mark.parametrize("size", range(20))
def test_other(size): pass
"""


@pytest.fixture
def folder(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.syspathinsert(Path(__file__).parents[2])
    pytester.makeini("[pytest]\nmarkers = share(count)\n")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TESTS)
    return pytester


def collected(folder: pytest.Pytester, *arguments: str) -> list[str]:
    run = folder.inline_run("--collect-only", *arguments)
    return [item.name for item in run.getcall("pytest_collection_finish").session.items]


def test_sample_size_applies_to_each_parameter_value(folder: pytest.Pytester) -> None:
    names = collected(folder, "--seed=1")
    for name in "abc":
        assert sum(it.startswith(f"test_many[{name}-") for it in names) == 2
    assert sum(it.startswith("test_few") for it in names) == 5
    assert len(names) == 3 * 2 + 5 + 2 * 3


def test_tests_of_one_file_sample_the_same_cases(folder: pytest.Pytester) -> None:
    names = collected(folder)
    one, other = ([it.partition("[")[2] for it in names if it.startswith(name)] for name in ("test_one", "test_other"))
    assert one == other != []


def test_seed_repeats_the_sample(folder: pytest.Pytester) -> None:
    assert collected(folder, "--seed=1") == collected(folder, "--seed=1")
    assert len({tuple(collected(folder, *seed)) for seed in (["--seed=1"], ["--seed=2"], [], [])}) == 4


def test_every_case_option_and_named_cases_run(folder: pytest.Pytester) -> None:
    assert len(collected(folder, "--every-case")) == 3 * 20 + 5 + 2 * 20
    assert collected(folder, "test_it.py::test_many[b-7]") == ["test_many[b-7]"]
