"""Routes, metrics, fields, and log lines in the documents exist, and pages that list them are complete."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.generation.cache_report import CacheReport
from app.generation.events import PromptProgress, TokenCounts
from app.generation.request_log import log, log_request
from app.server.application import create_application
from engine.request import Origin, TokenSources
from tests.app.server.live_server import LiveServer
from tests.request_tables import TABLES
from tests.support.markdown import fenced_blocks, inline_code, table_rows

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
# pages that also name slash commands of the chat, or the folders of a container
OTHER_PATHS = {"CHANGELOG.md", "chat.md", "install.md", "mcp.md", "security.md", "settings.md"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def routes(hash_server: LiveServer) -> set[tuple[str, str]]:
    """(method, path) of each route, including DELETE /api/delete, which only a server with downloads has."""
    found: Any = create_application(hash_server.models).routes
    return {("DELETE", "/api/delete"), *((route.method, route.path.replace(":path", "")) for route in found)}


def section(page: str, heading: str) -> str:
    return page.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def paths_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield (method, path) for each path in inline code. The method is empty if the code names none."""
    for code in inline_code(text):
        if match := re.fullmatch(r"(?:(GET|POST|DELETE) )?(/[\w/.{}-]*)(?:\?.*)?", code):
            yield match[1] or "", match[2]


def test_api_page_lists_every_route(routes: set[tuple[str, str]]) -> None:
    listed = paths_in(section(read("docs/api.md"), "Endpoints"))
    assert {entry for entry in listed if entry[0]} == routes


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_paths_within_sentences_exist(path: Path, routes: set[tuple[str, str]]) -> None:
    for method, named in paths_in(path.read_text(encoding="utf-8")):
        if path.name in OTHER_PATHS and not method and named.count("/") == 1:
            continue
        below = any(route.startswith(f"{named}/") for _, route in routes)
        assert any(route == named and method in ("", other) for other, route in routes) or (not method and below), named


def test_server_page_lists_every_metric(hash_server: LiveServer) -> None:
    scraped = httpx.get(f"{hash_server.url}/metrics", trust_env=False).text
    kinds = dict(re.findall(r"^# TYPE (\S+?)(?:_total)? (\w+)$", scraped, re.MULTILINE))
    rows = [row for row in table_rows(read("docs/server.md")) if row[0].startswith("`ingle:")]
    assert {row[0].strip("`"): row[1] for row in rows} == kinds
    samples = re.findall(r"^(ingle:\w+?)(?:_total|_bucket)?\{(.*?)\}", scraped, re.MULTILINE)
    labels = {name: set(re.findall(r"(\w+)=", text)) - {"model_name", "le"} for name, text in samples}
    for row in rows:
        assert labels[row[0].strip("`")] == set(re.findall(r"`(\w+)`", row[2])), row[0]


def test_dashboard_uses_exported_metrics_and_labels(hash_server: LiveServer) -> None:
    scraped = httpx.get(f"{hash_server.url}/metrics", trust_env=False).text
    exported: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(ingle:\w+)\{(.*?)\}", scraped, re.MULTILINE):
        exported.setdefault(name, set()).update(re.findall(r"(\w+)=", labels))
    kinds = re.findall(r"^# TYPE (\S+) (\w+)$", scraped, re.MULTILINE)
    exported |= {name: set() for name, kind in kinds if kind != "histogram" and name not in exported}
    board = json.loads(read("packaging/grafana.json"))
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    targets = [(panel["datasource"], target) for panel in panels for target in panel["targets"]]
    assert {source["uid"] for panel, target in targets for source in (panel, target["datasource"])} == {"${datasource}"}
    expressions = [target["expr"] for _, target in targets]
    for expression in (*expressions, *(variable["definition"] for variable in board["templating"]["list"][1:])):
        names = re.findall(r"ingle:\w+", expression)
        assert names, expression
        used = {label for found in re.findall(r"by \((.*?)\)", expression) for label in found.split(", ")}
        used |= set(re.findall(r"[{ ](\w+)(?:=~|!=|=)\"", expression))
        for name in names:
            assert name in exported, name
            assert used <= exported[name], (name, used)


def test_fields_of_the_api_page_are_in_the_tables() -> None:
    rows = table_rows(section(read("docs/api.md"), "Fields beyond OpenAI's"))[1:]
    fields = {code for row in rows for code in re.findall(r"`([^`]+)`", row[0])}
    known = {field.path for field in TABLES["POST /v1/chat/completions"].fields}
    assert fields
    assert fields <= known


def test_server_page_shows_real_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    sources = TokenSources(device=4192, computed=20)
    counts = TokenCounts(
        prompt=4212, cache=CacheReport(sources), completion=180, replies=1,
        first_token_seconds=0.061, total_seconds=0.061 + 179 / 92.4,
    )  # fmt: skip
    with caplog.at_level(logging.INFO, log.name), log_request("smollm2:135m", Origin(), counts) as prefill:
        prefill.log_progress(0, PromptProgress(7693, 21_979, 0, 97.0))
    shown = [
        block.strip().partition(" ")[2]
        for language, block in fenced_blocks(read("docs/server.md"))
        if language == "text"
    ]
    assert sorted(caplog.messages) == sorted(shown)
