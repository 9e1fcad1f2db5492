"""Models of Ollama and LM Studio are found by name, verified, used in place, and never written."""

import hashlib
import json
from pathlib import Path

import pytest

from app.errors import AppError, IntegrityError, ModelNotFound
from app.models.sources import pull
from app.models.store import ModelStore
from app.settings.settings import Settings, load_settings
from tests.app.models.checkpoint_folder import whole_files, write
from tests.app.models.tiny_model import CONTENT, settings_in

DIGEST = hashlib.sha256(CONTENT).hexdigest()
WEIGHTS = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}", "size": len(CONTENT)}
LICENSE = {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{'1' * 64}", "size": 5}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path, offline=True)


def blob(settings: Settings, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    write(settings.ollama_dir / "blobs", {f"sha256-{digest}": content})
    return f"sha256:{digest}"


def put(settings: Settings, place: str, **more: object) -> None:
    """Create a model as Ollama stores it, with its manifest at the path `place`."""
    blob(settings, CONTENT)
    config = blob(settings, json.dumps({"model_format": "gguf", "file_type": "Q4_K_M"}).encode())
    manifest = {"schemaVersion": 2, "config": {"digest": config}, "layers": [LICENSE, WEIGHTS], **more}
    write(settings.ollama_dir / "manifests", {place: json.dumps(manifest).encode()})


NAMES = [
    ("registry.ollama.ai/library/llama3.2/1b", "ollama:llama3.2:1b", "ollama:llama3.2:1b"),
    ("registry.ollama.ai/library/qwen3/latest", "ollama:qwen3", "ollama:qwen3:latest"),
    ("registry.ollama.ai/somebody/m/v1", "ollama:somebody/m:v1", "ollama:somebody/m:v1"),
    ("hf.co/org/Repo-GGUF/Q8_0", "ollama:hf.co/org/Repo-GGUF:Q8_0", "ollama:hf.co/org/Repo-GGUF:Q8_0"),
]


@pytest.mark.parametrize(("place", "asked", "name"), NAMES)
def test_ollama_model_is_used_without_a_copy(settings: Settings, place: str, asked: str, name: str) -> None:
    put(settings, place)
    before = {path: path.stat().st_mtime_ns for path in settings.ollama_dir.rglob("*")}
    stored = pull(asked, settings)
    assert (stored.name, stored.path) == (name, settings.ollama_dir / "blobs" / f"sha256-{DIGEST}")
    assert (stored.size, stored.sha256, stored.quantization, stored.source) == (
        len(CONTENT),
        DIGEST,
        "Q4_K_M",
        "Ollama",
    )
    assert [model.name for model in ModelStore(settings).entries()] == [name]
    with pytest.raises(AppError, match="belongs to Ollama") as caught:
        ModelStore(settings).remove(asked)
    assert caught.value.remedy == f"ollama rm {asked.removeprefix('ollama:')}"
    assert {path: path.stat().st_mtime_ns for path in settings.ollama_dir.rglob("*")} == before


def test_damaged_blob_is_refused(settings: Settings) -> None:
    put(settings, NAMES[0][0])
    write(settings.ollama_dir / "blobs", {f"sha256-{DIGEST}": CONTENT[:-1] + b"!"})
    with pytest.raises(IntegrityError, match="damaged"):
        pull("ollama:llama3.2:1b", settings)


@pytest.mark.parametrize(
    "layers",
    [
        None,
        [],
        [WEIGHTS, WEIGHTS],
        [{**WEIGHTS, "digest": "sha256:../../../etc/passwd"}],
        [{**WEIGHTS, "digest": f"sha256:{'0' * 64}"}],  # no blob has this digest
        [{**WEIGHTS, "mediaType": 7}],
        [7],
    ],
)
def test_invalid_manifests_are_ignored(settings: Settings, layers: object) -> None:
    put(settings, NAMES[0][0], layers=layers)
    assert ModelStore(settings).entries() == []
    with pytest.raises(ModelNotFound):
        pull("ollama:llama3.2:1b", settings)


@pytest.mark.parametrize("name", ["ollama:../../x", "ollama:a/b/c/d", "ollama:", "ollama:/etc/passwd", "ollama:a:b:c"])
def test_names_cannot_escape_the_folder(settings: Settings, name: str) -> None:
    put(settings, NAMES[0][0])
    with pytest.raises(ModelNotFound) as caught:
        pull(name, settings)
    assert caught.value.remedy == "Choose one of: ollama:llama3.2:1b."


def test_lm_studio_model_is_used_without_a_copy(settings: Settings) -> None:
    folder = settings.lmstudio_dir / "org" / "Tiny-GGUF"
    write(folder, {"tiny-Q4_K_M.gguf": CONTENT, "tiny-Q8_0.gguf": CONTENT + b"!", "mmproj-F16.gguf": b"x"})
    stored = pull("lmstudio:org/Tiny-GGUF", settings)
    assert (stored.name, stored.path) == ("lmstudio:org/Tiny-GGUF:Q4_K_M", folder / "tiny-Q4_K_M.gguf")
    assert (stored.sha256, stored.source) == (DIGEST, "LM Studio")
    assert pull("lmstudio:org/Tiny-GGUF:q8_0", settings).path == folder / "tiny-Q8_0.gguf"
    names = ["lmstudio:org/Tiny-GGUF:Q4_K_M", "lmstudio:org/Tiny-GGUF:Q8_0"]
    assert [model.name for model in ModelStore(settings).entries()] == names
    with pytest.raises(AppError, match="belongs to LM Studio"):
        ModelStore(settings).remove(names[0])
    with pytest.raises(ModelNotFound):
        pull("lmstudio:org/../Tiny-GGUF", settings)
    assert len([*folder.iterdir()]) == 3


def test_lm_studio_checkpoint_is_used(settings: Settings) -> None:
    folder = write(settings.lmstudio_dir / "org" / "Tiny", whole_files())
    assert pull("lmstudio:org/Tiny", settings).path == folder


def test_default_folders_are_those_of_ollama_and_lm_studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    (tmp_path / ".ollama" / "models").mkdir(parents=True)
    (tmp_path / ".cache" / "lm-studio" / "models").mkdir(parents=True)
    settings = load_settings()
    assert settings.ollama_dir == tmp_path / ".ollama" / "models"
    assert settings.lmstudio_dir == tmp_path / ".cache" / "lm-studio" / "models"
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "elsewhere"))
    assert load_settings().ollama_dir == tmp_path / "elsewhere"
