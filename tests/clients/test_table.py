"""The rows in the table of clients are valid, and docs/clients.md shows all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.cases import CASES
from tests.clients.driver_process import ROOT, Outcome
from tests.clients.environments import Environment
from tests.clients.report import HEADING, INTRODUCTION, Row, as_markdown, as_text
from tests.clients.table import SCRIPTED, SMOLLM2, Client, read_clients

CLIENTS = read_clients(Path("/project/note.txt"))
HERE = Path(__file__).parent
OK, FAILED = Outcome(True, "Paris"), Outcome(False, "HTTP 500")


def drivers_of(folder: str, pattern: str) -> Iterator[str]:
    return (path.stem if path.suffix == ".py" else path.name for path in (HERE / folder).glob(pattern))


def test_every_row_has_known_driver_server_and_cases() -> None:
    known = {*drivers_of("drivers", "*.py"), *drivers_of("agents", "*.py"), *drivers_of("node", "*.mjs")}
    for client in CLIENTS:
        assert client.driver in known, client.name
        assert {client.server_of(case) for case in CASES} <= {SMOLLM2, SCRIPTED}, client.name
        assert set(client.reasons) <= set(CASES), client.name


def test_every_driver_has_a_row() -> None:
    shared = {"agent", "tap", "cases.mjs"}
    used = {client.driver for client in CLIENTS} | shared
    assert used == {*drivers_of("drivers", "*.py"), *drivers_of("agents", "*.py"), *drivers_of("node", "*.mjs")}


def test_client_names_are_unique() -> None:
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)


def test_page_shows_every_client_in_order() -> None:
    page = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
    results = page[page.index(HEADING) :]
    assert results.startswith(INTRODUCTION)
    shown = [line.split(" | ")[0].removeprefix("| ") for line in results.splitlines() if line.count(" | ") == 6]
    assert shown == ["client", *(client.title for client in CLIENTS)]


@pytest.fixture
def client() -> Client:
    return Client("one", "One", Environment("one", "pip", ["one"]), "one", "openai", reasons={"tool": "calls no tools"})


def test_failed_cell_shows_the_known_reason(client: Client) -> None:
    row = Row(client, {"one": "1.0"}, {**dict.fromkeys(CASES, OK), "tool": FAILED})
    assert not row.has_failure
    line = "| One | one 1.0 | ok | ok | calls no tools | ok | ok |"
    page = as_markdown([row], f"# Clients\n\n{HEADING}\nearlier results\n")
    assert page == f"# Clients\n\n{INTRODUCTION}\n{line}\n"


def test_failed_cell_without_a_reason_is_listed_with_its_detail(client: Client) -> None:
    row = Row(client, {"one": "1.0"}, {**dict.fromkeys(CASES, OK), "stream": FAILED})
    assert row.has_failure
    assert "one, stream: HTTP 500" in as_text([row]).splitlines()
