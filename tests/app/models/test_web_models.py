"""GGUF files from web addresses that include a digest, served on loopback."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import AppError, IntegrityError, ModelNotFound
from app.models.sources import pull
from app.models.store import ModelStore
from app.models.web_models import WebName
from app.settings.settings import Settings
from tests.app.models.fake_hub import FakeHub, Mishap, serve
from tests.app.models.tiny_model import CONTENT, files_below, settings_in

DIGEST = hashlib.sha256(CONTENT).hexdigest()
HALF = len(CONTENT) // 2


@pytest.fixture
def host() -> Iterator[FakeHub]:
    with serve(CONTENT) as served:
        yield served


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path, hub_token="hf_secret")  # noqa: S106


def name_at(host: FakeHub) -> str:
    return f"{host.address}/some/tiny-Q4_0.gguf?download=1#sha256={DIGEST.upper()}"


@pytest.mark.parametrize("ranges", [True, False])
def test_file_is_downloaded_found_and_removed(host: FakeHub, settings: Settings, tmp_path: Path, ranges: bool) -> None:
    host.ranges = ranges
    stored = pull(name_at(host), settings)
    assert stored.path.read_bytes() == CONTENT
    assert stored.path.is_relative_to(settings.models_dir)
    assert stored.name == str(WebName.parse(name_at(host)))
    assert (stored.quantization, stored.source) == ("Q4_0", "web")
    asked = len(host.requests)
    assert pull(stored.name, settings_in(tmp_path, offline=True)) == stored
    assert ModelStore(settings).entries() == [stored]
    assert len(host.requests) == asked
    assert not any(headers["Authorization"] for _, _, headers in host.requests)
    assert ModelStore(settings).remove(stored.name, really=False)[0].freed == len(CONTENT)
    [removal] = ModelStore(settings).remove(stored.name)
    assert (removal.freed, removal.shared) == (len(CONTENT), False)
    assert ModelStore(settings).entries() == []
    with pytest.raises(ModelNotFound):
        ModelStore(settings).remove(stored.name)


def test_interrupted_download_resumes(host: FakeHub, settings: Settings) -> None:
    host.mishaps += [Mishap(), Mishap(cut_at=HALF), Mishap(status=404)]
    with pytest.raises(AppError, match=r"127\.0\.0\.1 refused tiny-Q4_0\.gguf \(it returned status 404\)"):
        pull(name_at(host), settings)
    assert ModelStore(settings).entries() == []
    assert pull(name_at(host), settings).path.read_bytes() == CONTENT
    assert host.ranges_asked_for()[-1] == f"bytes={HALF}-"


def test_wrong_bytes_leave_no_file(host: FakeHub, settings: Settings) -> None:
    host.content = CONTENT[:-1] + b"!"
    with pytest.raises(IntegrityError, match="sha256"):
        pull(name_at(host), settings)
    assert not any(name.startswith("tiny") for name in files_below(settings.models_dir))
    assert ModelStore(settings).entries() == []


def test_damaged_file_is_downloaded_again_or_refused(host: FakeHub, settings: Settings, tmp_path: Path) -> None:
    stored = pull(name_at(host), settings)
    stored.path.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(IntegrityError, match="damaged"):
        pull(name_at(host), settings_in(tmp_path, offline=True))
    assert pull(name_at(host), settings).path.read_bytes() == CONTENT


def test_host_that_does_not_state_the_size_is_an_error(host: FakeHub, settings: Settings) -> None:
    host.mishaps.append(Mishap(headers={"Content-Length": ""}, ignores_range=True))
    with pytest.raises(AppError, match="does not state the size"):
        pull(name_at(host), settings)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("https://example.org/tiny.gguf", "has no digest"),
        ("https://example.org/tiny.bin#sha256=" + DIGEST, "does not end in the name of a GGUF file"),
        ("https://example.org/..%2F..%2Fx.gguf/../.gguf#sha256=" + DIGEST, "does not end in the name"),
        ("https://example.org/a%5Cb.gguf#sha256=" + DIGEST, "does not end in the name"),
        ("https://example.org/nul.gguf#sha256=" + DIGEST, "does not end in the name"),
        ("https://me:secret@example.org/tiny.gguf#sha256=" + DIGEST, "which model lists would show"),
    ],
)
def test_incomplete_addresses_are_refused(settings: Settings, text: str, problem: str) -> None:
    with pytest.raises(AppError, match=problem):
        pull(text, settings)


def test_encoded_slash_is_not_part_of_the_file_name() -> None:
    name = WebName.parse(f"https://example.org/x%2F..%2Ftiny.gguf#sha256={DIGEST}")
    assert name is not None
    assert name.file == "tiny.gguf"
