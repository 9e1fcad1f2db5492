"""Downloads from a hub on loopback that disconnects, stalls, damages bytes, redirects, and requests delays."""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from random import Random
from threading import Barrier

import pytest

from app.errors import IntegrityError, Offline
from app.models.sources import pull
from app.models.stored_model import StoredModel
from app.models.transfer import attempts, transfer
from app.models.transfer.attempts import retry_after
from app.progress import Report, SilentProgress, Unit
from app.settings.settings import Settings
from tests.app.models.fake_hub import FakeHub, Mishap, serve
from tests.app.models.tiny_model import files_below, settings_in

REPO = "org/Tiny"
CONTENT = Random(5).randbytes(50_000)
HALF = len(CONTENT) // 2
FILE = "tiny-Q4_0.gguf"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve() as served:
        served.repositories[REPO] = {FILE: CONTENT}
        yield served


@pytest.fixture
def settings(hub: FakeHub, tmp_path: Path) -> Settings:
    return settings_in(tmp_path, hub_endpoint=hub.address)


class Recorder(SilentProgress):
    """Records the progress lines and amounts."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.amounts: list[int] = []

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        yield self.amounts.append

    def say(self, line: str) -> None:
        self.lines.append(line)


def check(stored: StoredModel) -> None:
    assert stored.path.read_bytes() == CONTENT
    assert not any(name.endswith(".partial") for name in files_below(stored.path.parents[2]))


def file_requests(hub: FakeHub) -> list[tuple[str | None, str | None]]:
    """Return the (Range, If-Range) headers of each download request."""
    return [(headers["Range"], headers["If-Range"]) for path, headers in hub.downloads() if "/resolve/" in path]


@pytest.mark.parametrize(
    "mishap",
    [
        Mishap(status=429, headers={"Retry-After": "0"}),
        Mishap(status=503),
        Mishap(cut_at=0),
        Mishap(headers={"X-Linked-Etag": '"' + "0" * 64 + '"'}),  # one machine of the host has an outdated file
        Mishap(flip_at=7),
        Mishap(headers={"Content-Length": str(HALF)}),
    ],
)
def test_single_failure_is_retried(hub: FakeHub, settings: Settings, mishap: Mishap) -> None:
    hub.mishaps.append(mishap)
    check(pull(REPO, settings))
    assert file_requests(hub) == [(None, None)] * 2


def test_stalled_download_resumes(hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STALL", 0.2)
    hub.mishaps.append(Mishap(stall_at=HALF))
    check(pull(REPO, settings))
    assert len(file_requests(hub)) >= 2  # on a busy machine, the retry may stall as well


def test_slow_response_is_retried(hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_WINDOW", 0.0)
    monkeypatch.setattr(attempts, "_QUIET_SECONDS", -1.0)
    hub.mishaps.append(Mishap(stall_at=HALF))  # the client gives up on the slow response before it stalls
    progress = Recorder()
    check(pull(REPO, settings, progress))
    assert "127.0.0.1 is too slow. Retrying in 0 s." in progress.lines
    assert all(asked for asked, _ in file_requests(hub)[1:])


def test_connection_lost_after_the_last_byte_is_ignored(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STALL", 0.3)
    hub.mishaps.append(Mishap(headers={"Content-Length": "", "Transfer-Encoding": "chunked"}, chunked=True))
    check(pull(REPO, settings))
    assert not hub.ranges_asked_for()


def test_range_requests_name_the_etag(hub: FakeHub, settings: Settings) -> None:
    hub.mishaps.append(Mishap(headers={"ETag": '"old"'}, cut_at=HALF))
    check(pull(REPO, settings))
    # no third request, because the second response was the whole file
    assert file_requests(hub) == [(None, None), (f"bytes={HALF}-", '"old"')]


def test_file_damaged_twice_leaves_no_part(hub: FakeHub, settings: Settings) -> None:
    hub.mishaps += [Mishap(flip_at=HALF), Mishap(flip_at=HALF + 1)]
    progress = Recorder()
    with pytest.raises(IntegrityError, match=f"{FILE}: the file has sha256"):
        pull(REPO, settings, progress)
    assert progress.lines[-1].endswith("Downloading it once more.")
    assert files_below(settings.hub_cache) == set()


def test_file_changed_on_the_hub_is_refused(hub: FakeHub, settings: Settings) -> None:
    hub.mishaps += [Mishap(headers={"X-Linked-Etag": '"' + "0" * 64 + '"'})] * 20
    with pytest.raises(IntegrityError, match="has changed"):
        pull(REPO, settings)
    assert files_below(settings.hub_cache) == set()


def test_wait_is_reported_with_its_reason(hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_QUIET_SECONDS", -1.0)
    hub.mishaps.append(Mishap(status=429, headers={"Retry-After": "0"}))
    progress = Recorder()
    check(pull(REPO, settings, progress))
    line = "127.0.0.1 is unavailable (it returned status 429). Retrying in 0 s."
    assert line in progress.lines


def test_excessive_retry_after_gives_up(hub: FakeHub, settings: Settings) -> None:
    hub.mishaps += [Mishap(cut_at=HALF), Mishap(status=429, headers={"Retry-After": "3600"})]
    with pytest.raises(Offline, match=r"returned status 429, and asks to wait 3600 s"):
        pull(REPO, settings)
    assert len(file_requests(hub)) == 2
    assert files_below(settings.hub_cache) == {f"{DIGEST}.partial"}


@pytest.mark.parametrize(
    ("text", "wait"),
    [("120", 120.0), ("", None), ("-5", None), ("soon", None), ("9" * 400, None), (formatdate(0, usegmt=True), 0.0)],
)
def test_retry_after_header_is_parsed(text: str, wait: float | None) -> None:
    assert retry_after({"Retry-After": text}) == wait


def test_files_are_downloaded_in_parallel(hub: FakeHub, settings: Settings) -> None:
    parts = {f"tiny-Q8_0-{n:05d}-of-00004.gguf": CONTENT[: HALF + n] for n in (1, 2, 3, 4)}
    hub.repositories[REPO] = parts
    hub.meeting = Barrier(len(parts), timeout=20)  # breaks if the files are downloaded one after another
    progress = Recorder()
    stored = pull(REPO, settings, progress)
    assert not hub.meeting.broken
    assert [path.read_bytes() for path in stored.weights()] == [*parts.values()]
    assert max(progress.amounts) == sum(map(len, parts.values()))


class Interrupted(Recorder):
    """Raises KeyboardInterrupt in the middle of the download."""

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        def report(done: int) -> None:
            if done > HALF:
                raise KeyboardInterrupt

        yield report


def test_interrupt_keeps_the_received_part(hub: FakeHub, settings: Settings) -> None:
    hub.mishaps.append(Mishap(stall_at=HALF + 1))  # without the stall, the whole file might arrive before the interrupt
    with pytest.raises(KeyboardInterrupt):
        pull(REPO, settings, Interrupted())
    assert files_below(settings.hub_cache) == {f"{DIGEST}.partial"}
    progress = Recorder()
    check(pull(REPO, settings, progress))
    assert file_requests(hub)[1:] == [(f"bytes={HALF + 1}-", None)]
    assert progress.amounts[-1] == len(CONTENT)


def test_redirect_to_another_protocol_is_an_error(hub: FakeHub, settings: Settings) -> None:
    hub.mishaps += [Mishap(status=302, headers={"Location": "ftp://127.0.0.1/x"})] * 9
    with pytest.raises(Offline, match="the response is invalid"):
        pull(REPO, settings)
    assert len(file_requests(hub)) == 1


def test_token_is_not_logged(hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    settings = settings_in(tmp_path, hub_endpoint=hub.address, hub_token="hf_secret")  # noqa: S106
    progress = Recorder()
    hub.mishaps += [Mishap(cut_at=HALF), Mishap(status=503), Mishap(flip_at=0)]
    check(pull(REPO, settings, progress))
    assert all(headers["Authorization"] == "Bearer hf_secret" for _, headers in hub.downloads())
    assert caplog.records
    assert "hf_secret" not in caplog.text + "".join(progress.lines)
