"""The installed version, the newest one on the package index, and the command that updates this installation."""

import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from app.errors import AppError, InvalidSetting, Offline
from app.models.reachability import check_reachable
from app.settings.settings import Settings
from app.settings.values import web_address

NAME = "inglenook"
_MAX_BYTES = 16 << 20  # longest page of an index that is read
_SECONDS = 20.0  # time limit of the request
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
# Parts of the path of an installation -> the command that updates it.
_TOOLS: Mapping[tuple[str, ...], str] = {
    ("pipx", "venvs"): f"pipx upgrade {NAME}",
    ("uv", "tools"): f"uv tool upgrade {NAME}",
    ("Cellar", NAME): f"brew upgrade {NAME}",
}


@dataclass(frozen=True, slots=True)
class Release:
    """A file of a release on an index."""

    filename: str
    requires_python: str = ""
    is_yanked: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """The result of a check."""

    installed: str | None  # None: the program runs from a checkout
    latest: str
    is_newer: bool
    command: str
    index: str  # host of the index


def installed_version() -> str | None:
    """Return the installed version; None if the program runs from a checkout."""
    found = _distribution()
    return None if found is None else found.version


def update_command(prefix: str = sys.prefix) -> str:
    """Return the command that updates the installation in the folder `prefix`."""
    parts = Path(prefix).parts
    for folders, command in _TOOLS.items():
        if any(parts[start : start + len(folders)] == folders for start in range(len(parts))):
            return command
    if (found := _distribution()) is None:
        return "git pull"
    if (Path(prefix) / "conda-meta").is_dir():
        return f"conda update {NAME}"
    return shlex.join([sys.executable, "-m", "pip", "install", "--upgrade", _source(found)])


def check_for_update(settings: Settings) -> Update:
    """Compare the installed version with the newest one on the index that runs on this Python.

    Raises InvalidSetting for an index without a web address, Offline if the index cannot be reached or the setting
    `offline` is on, and AppError for its other errors.
    """
    from packaging.version import Version

    host = urlsplit(settings.package_index).hostname or ""
    installed = installed_version()
    current = Version(installed or "0")
    newest = max(_versions(_releases(settings, host), with_previews=current.is_prerelease), default=None)
    if newest is None:
        raise AppError(f"{host} has no release of {NAME} for this Python", f"See {settings.origins['package_index']}.")
    return Update(installed, str(newest), newest > current and installed is not None, update_command(), host)


def _distribution() -> Distribution | None:
    """Return the installed distribution that contains this module; None for a checkout."""
    try:
        return distribution(NAME) if Path(__file__).parents[2].name == NAME else None
    except PackageNotFoundError:
        return None


def _source(found: Distribution) -> str:
    """Return the name of the package, or the folder or repository from which it was installed (PEP 610)."""
    try:
        url = json.loads(found.read_text("direct_url.json") or "{}").get("url", "")
    except (ValueError, AttributeError):
        url = ""
    parts = urlsplit(str(url))
    return unquote(parts.path) if parts.scheme == "file" else NAME if not url else str(url)


def _versions(releases: "Iterator[Release]", *, with_previews: bool) -> "Iterator[Any]":
    """Yield the versions of files that this Python can install."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename

    python = ".".join(map(str, sys.version_info[:3]))
    for release in releases:
        parse = parse_wheel_filename if release.filename.endswith(".whl") else parse_sdist_filename
        try:
            version = parse(release.filename)[1]
            runs = SpecifierSet(release.requires_python).contains(python)
        except (InvalidWheelFilename, InvalidSdistFilename, InvalidSpecifier):
            continue
        if runs and not release.is_yanked and (with_previews or not version.is_prerelease):
            yield version


def _releases(settings: Settings, host: str) -> Iterator[Release]:
    if settings.offline:
        raise Offline("the setting offline is on", "ingle config unset offline")
    try:
        index = web_address(settings.package_index)
    except ValueError as problem:
        raise InvalidSetting(f"package_index {problem}", f"It is set by {settings.origins['package_index']}.") from None
    check_reachable(index)
    kind, content = _page(f"{index}/{NAME}/", host)
    try:
        yield from _of_json(content) if "json" in kind else _of_html(content)
    except (ValueError, TypeError, AttributeError, KeyError) as problem:
        raise AppError(f"{host} returned a page that is not a package index", "Check package_index.") from problem


def _page(address: str, host: str) -> tuple[str, bytes]:
    """Return the media type and the content of a page of the index."""
    import httpx

    content, ends = bytearray(), time.monotonic() + _SECONDS
    try:
        with (
            httpx.Client(timeout=_SECONDS / 2, follow_redirects=True, headers={"User-Agent": NAME}) as client,
            client.stream("GET", address, headers={"Accept": _ACCEPT}) as response,
        ):
            if response.status_code == httpx.codes.NOT_FOUND:
                raise AppError(f"{host} has no package {NAME}", "Set package_index to an index that has it.")
            if not response.is_success:
                raise Offline(f"{host} returned status {response.status_code}", "Try again later.")
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > _MAX_BYTES:
                    raise AppError(f"{host} returned a page of more than {_MAX_BYTES >> 20} MiB")
                if time.monotonic() > ends:
                    raise Offline(f"{host} did not answer within {_SECONDS:.0f} s", "Try again later.")
            return response.headers.get("content-type", ""), bytes(content)
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        raise Offline(
            f"{host} cannot be reached ({type(problem).__name__})", "Check the network and proxies."
        ) from problem


def _of_json(content: bytes) -> Iterator[Release]:
    """Read a page in the JSON format of PEP 691."""
    for file in json.loads(content)["files"]:
        yield Release(str(file["filename"]), file.get("requires-python") or "", bool(file.get("yanked")))


def _of_html(content: bytes) -> Iterator[Release]:
    """Read a page in the HTML format of PEP 503."""
    page = _Links()
    page.feed(content.decode(errors="replace"))
    for attributes in page.links:
        name = unquote(urlsplit(attributes.get("href") or "").path.rpartition("/")[2])
        yield Release(name, attributes.get("data-requires-python") or "", "data-yanked" in attributes)


class _Links(HTMLParser):
    """Collects the attributes of all links."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[Mapping[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links.append(dict(attrs))
