"""`ingle update` against a package index on loopback, in both formats of its pages."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from app.doctor import installation
from app.doctor.installation import update_command
from tests.app.command_line import ingle

VERSIONS = ("0.9.0", "0.10.0", "0.10.0rc1", "0.11.0b1")


@dataclass
class Index:
    """A package index. `answer` is its page of the package: media type and content."""

    url: str
    status: int = 200
    answer: tuple[str, bytes] = ("", b"")
    asked: list[str] = field(default_factory=list)

    def publish(self, *files: dict[str, Any]) -> None:
        page = json.dumps({"meta": {"api-version": "1.1"}, "name": "inglenook", "files": list(files)}).encode()
        self.answer = ("application/vnd.pypi.simple.v1+json", page)


@contextmanager
def serving() -> Iterator[Index]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_GET(self) -> None:
            kind, content = served.answer
            served.asked.append(f"{self.path} {self.headers['User-Agent']}")
            self.send_response(served.status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Index(f"http://127.0.0.1:{server.server_port}/simple")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def index() -> Iterator[Index]:
    with serving() as served:
        yield served


def wheel(version: str, **more: object) -> dict[str, Any]:
    return {"filename": f"inglenook-{version}-py3-none-any.whl", "url": "x", **more}


class Installed(Distribution):
    """A distribution with a version, and the address from which it was installed."""

    def __init__(self, version: str, url: str = "") -> None:
        self._version, self._url = version, url

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: inglenook\nVersion: {self._version}\n"
        return json.dumps({"url": self._url}) if filename == "direct_url.json" and self._url else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.9.0")


def install(monkeypatch: pytest.MonkeyPatch, version: str, url: str = "") -> None:
    monkeypatch.setattr(installation, "_distribution", lambda: Installed(version, url))


def check(index: Index, *arguments: str, **environment: str) -> tuple[int, str, str]:
    own = {"INGLE_PACKAGE_INDEX": index.url, "NO_PROXY": "127.0.0.1", **environment}
    done = ingle(own, "update", "--check", *arguments)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_newer_version_is_reported_with_the_command(index: Index) -> None:
    index.publish(*map(wheel, VERSIONS))
    status, out, _ = check(index)
    assert status == 10
    assert out.startswith("inglenook 0.10.0 is available; 0.9.0 is installed.\n")
    assert out.splitlines()[1] == update_command()
    assert index.asked == ["/simple/inglenook/ inglenook"]
    found = json.loads(check(index, "--json")[1])
    assert (found["installed"], found["latest"], found["is_newer"], found["index"]) == (
        "0.9.0", "0.10.0", True, "127.0.0.1"
    )  # fmt: skip


def test_newest_version_is_status_0(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.publish(*map(wheel, VERSIONS))
    install(monkeypatch, "0.10.0")
    assert check(index)[:2] == (0, "inglenook 0.10.0 is the newest version (127.0.0.1 has 0.10.0).\n")
    install(monkeypatch, "0.10.0rc1")  # a preview is compared with all versions
    assert check(index)[0] == 10
    install(monkeypatch, "1.0")  # newer than the index
    assert check(index)[0] == 0


def test_yanked_files_and_files_for_other_pythons_are_ignored(index: Index) -> None:
    index.publish(
        wheel("0.9.0"),
        wheel("2.0", yanked="broken"),
        wheel("3.0", **{"requires-python": ">=4"}),
        {"filename": "inglenook-1.0.tar.gz"},
        {"filename": "inglenook-9.0.exe"},
        wheel("4.0", **{"requires-python": "nonsense"}),
    )
    assert json.loads(check(index, "--json")[1])["latest"] == "1.0"


def test_html_pages_are_read(index: Index) -> None:
    index.answer = (
        "text/html",
        b'<a href="../../f/inglenook-1.0-py3-none-any.whl#sha256=0">inglenook-1.0-py3-none-any.whl</a>'
        b'<a href="/f/inglenook-2.0.tar.gz" data-yanked="">2</a>'
        b'<a href="/f/inglenook-3.0.tar.gz" data-requires-python="&gt;=4">3</a><a>none</a>',
    )
    assert json.loads(check(index, "--json")[1])["latest"] == "1.0"


@pytest.mark.parametrize(
    ("status", "answer", "exit_status", "message"),
    [
        (404, ("", b""), 1, "127.0.0.1 has no package inglenook"),
        (503, ("", b""), 5, "127.0.0.1 returned status 503"),
        (200, ("application/json", b"[]"), 1, "a page that is not a package index"),
        (200, ("application/json", b"{"), 1, "a page that is not a package index"),
        (200, ("text/html", b"\xff<html>"), 1, "has no release of inglenook for this Python"),
    ],
)
def test_refusals_of_the_index_are_reported(
    status: int, answer: tuple[str, bytes], exit_status: int, message: str, index: Index
) -> None:
    index.status, index.answer = status, answer
    found, _, said = check(index)
    assert found == exit_status
    assert message in said


def test_unreachable_index_and_offline_are_status_5(index: Index) -> None:
    status, _, said = check(index, INGLE_PACKAGE_INDEX="http://127.0.0.1:9/simple")
    assert status == 5
    assert said.startswith("error: 127.0.0.1 cannot be reached")
    status, _, said = check(index, INGLE_OFFLINE="1")
    assert (status, index.asked) == (5, [])
    assert said.startswith("error: the setting offline is on")


def test_index_of_pip_and_proxies_are_used(index: Index) -> None:
    index.publish(wheel("0.9.0"))
    own = {"INGLE_PACKAGE_INDEX": "", "PIP_INDEX_URL": "http://index.example/simple/", "NO_PROXY": "", "no_proxy": ""}
    own |= {"http_proxy": index.url.removesuffix("/simple"), "HTTP_PROXY": ""}
    assert ingle(own, "update", "--check").returncode == 0
    assert index.asked == ["http://index.example/simple/inglenook/ inglenook"]


def test_index_in_a_folder_is_refused_only_by_the_check(index: Index) -> None:
    own = {"INGLE_PACKAGE_INDEX": "", "PIP_INDEX_URL": "file:///opt/simple"}
    done = ingle(own, "update", "--check")
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: package_index must be a URL that starts with https:// or http://")
    assert ingle(own, "config", "list").returncode == 0


def test_without_check_the_command_is_shown_and_no_index_is_asked(index: Index) -> None:
    done = ingle({"INGLE_PACKAGE_INDEX": index.url}, "update")
    assert (done.returncode, done.stdout.decode()) == (0, f"inglenook 0.9.0\n{update_command()}\n")
    assert json.loads(ingle({}, "update", "--json").stdout)["installed"] == "0.9.0"
    assert index.asked == []


@pytest.mark.parametrize(
    ("prefix", "command"),
    [
        ("/home/me/.local/share/pipx/venvs/inglenook", "pipx upgrade inglenook"),
        ("/home/me/.local/share/uv/tools/inglenook", "uv tool upgrade inglenook"),
        ("/opt/homebrew/Cellar/inglenook/0.1.0/libexec", "brew upgrade inglenook"),
    ],
)
def test_command_follows_the_way_of_installation(prefix: str, command: str) -> None:
    assert update_command(prefix) == command


def test_command_of_pip_names_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    assert update_command("/venv").endswith(" -m pip install --upgrade inglenook")
    install(monkeypatch, "0.1.0", "file:///home/me/in%20glenook")
    assert update_command("/venv").endswith(" -m pip install --upgrade '/home/me/in glenook'")
    monkeypatch.setattr(installation, "_distribution", lambda: None)
    assert update_command("/venv") == "git pull"
