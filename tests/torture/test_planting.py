"""Tests of the tables of faults, and of the program that plants them."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.torture.planted_faults import FAULTS
from tests.torture.planting import ROOT, Fault, passes, planted
from tests.torture.removed_guards import GUARDS

DOUBLED = Fault("double.py", "2 * number", "3 * number", ("test_double.py",))


@pytest.mark.parametrize("faults", [FAULTS, GUARDS], ids=["faults", "guards"])
def test_every_fault_replaces_one_text_and_leaves_valid_code(faults: Mapping[str, Fault]) -> None:
    for fault in faults.values():
        before, after = fault.source(ROOT)
        assert before != after
        compile(after, fault.file, "exec")


@pytest.mark.parametrize("faults", [FAULTS, GUARDS], ids=["faults", "guards"])
def test_every_fault_names_existing_tests(faults: Mapping[str, Fault]) -> None:
    for test in {test for fault in faults.values() for test in fault.tests}:
        path, _, name = test.partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name.partition('[')[0]}", source, re.MULTILINE), test


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "double.py").write_text("def double(number: int) -> int:\n    return 2 * number\n")
    (tmp_path / "test_double.py").write_text(
        "import double\n\ndef test_double() -> None:\n    assert not double.double(0)\n"
    )
    return tmp_path


def test_fault_that_no_test_finds_is_missed(tree: Path) -> None:
    with planted(tree, DOUBLED):
        assert passes(tree, DOUBLED.tests)


def test_fault_is_found_by_a_failing_test_and_undone(tree: Path) -> None:
    before = (tree / "double.py").read_text()
    (tree / "test_double.py").write_text(
        "import double\n\ndef test_double() -> None:\n    assert double.double(1) == 2\n"
    )
    with planted(tree, DOUBLED):
        assert not passes(tree, DOUBLED.tests)
    assert passes(tree, DOUBLED.tests)
    assert (tree / "double.py").read_text() == before


def test_text_that_is_not_unique_is_refused(tree: Path) -> None:
    for text in ("absent", "number"):
        with pytest.raises(ValueError, match="times"), planted(tree, Fault("double.py", text, "", ())):
            pass


def test_absent_test_is_an_error(tree: Path) -> None:
    with pytest.raises(RuntimeError):
        passes(tree, ["test_double.py::test_absent"])
