"""`ingle open` with a record of a server: the address in the browser or on stdout."""

import os
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.cli import ingle
from app.errors import NoServer
from app.process.instance import Instance, recorded
from app.settings.settings import load_settings

PORT = 4999


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the addresses that the browser opens."""
    monkeypatch.setenv("INGLE_STATE_DIR", str(tmp_path))
    addresses: list[str] = []

    def note(address: str) -> bool:
        addresses.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", note)
    return addresses


@pytest.fixture
def server(opened: list[str]) -> Iterator[Instance]:
    url = f"http://127.0.0.1:{PORT}"
    instance = Instance(os.getpid(), PORT, url, "m", "/m.gguf", "2026-01-01T00:00:00+00:00", serves_all=True)
    with recorded(instance, load_settings()):
        yield instance


def run(*arguments: str) -> Result:
    return CliRunner().invoke(ingle, ["open", *arguments])


def test_page_opens_in_the_browser(server: Instance, opened: list[str]) -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (0, "")
    assert opened == [f"http://127.0.0.1:{PORT}/"]
    assert f"http://127.0.0.1:{PORT}/" in result.stderr


def test_address_is_printed_and_opens_nothing(server: Instance, opened: list[str]) -> None:
    result = run("--print")
    assert (result.exit_code, result.stdout, opened) == (0, f"http://127.0.0.1:{PORT}/\n", [])


def test_missing_browser_is_reported_with_the_address(server: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    result = run()
    assert result.exit_code == 0
    assert f"no browser. The page is at http://127.0.0.1:{PORT}/" in result.stderr


def test_key_of_the_user_is_announced(server: Instance, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_API_KEY", "sk-of-the-user")
    result = run()
    assert "The page asks for your API key." in result.stderr
    assert "sk-of-the-user" not in result.output


def test_no_server_is_started(opened: list[str]) -> None:
    result = run()
    assert isinstance(result.exception, NoServer)
    assert result.exception.remedy == "ingle serve"
    assert opened == []
    assert isinstance(run("--port", "4998").exception, NoServer)
