"""Tests of finding the running server of a model."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from app.client.running_server import FoundServer, find_instances, find_servers, start_service
from app.process.instance import Instance, recorded
from app.settings.settings import Settings, load_settings
from tests.support.local_servers import free_port


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return load_settings(state_dir=tmp_path / "state")


def made(port: int = 4645, model: str = "smollm2:135m", path: str = "/m.gguf") -> Instance:
    return Instance(os.getpid(), port, f"http://127.0.0.1:{port}", model, path, "2026-01-01T00:00:00+00:00")


def find_instance(settings: Settings) -> Instance | None:
    return next(iter(find_instances(settings)), None)


def test_server_of_a_model_is_found(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    link = tmp_path / "link.gguf"
    link.symlink_to(file)
    with recorded(made(1, "smollm2:135m"), settings), recorded(made(2, "./link.gguf", str(link)), settings):
        for name, port in [("smollm2:135m", 1), ("SmolLM2", 1), (str(file), 2), (str(link), 2)]:
            found = find_instance(replace(settings, model=name))
            assert found is not None, name
            assert found.port == port
        for name in ("other:1b", str(tmp_path / "other.gguf")):
            assert find_instance(replace(settings, model=name)) is None


def test_server_of_a_hub_model_is_found_by_repository_name(settings: Settings, tmp_path: Path) -> None:
    # a relative path that looks like a repository name
    elsewhere = made(2, "org/other", str(tmp_path / "org" / "other"))
    cached = made(1, "org/repo", str(settings.hub_cache / "models--org--repo" / "snapshots" / "0123"))
    with recorded(cached, settings), recorded(elsewhere, settings):
        assert find_instance(replace(settings, model="hf:org/repo")) == cached
        for name in ("org/repo:Q8_0", "org/other"):
            assert find_instance(replace(settings, model=name)) is None


def test_name_without_quantization_finds_server_of_stored_model(settings: Settings, tmp_path: Path) -> None:
    settings = replace(settings, hub_cache=tmp_path / "hub", ollama_dir=tmp_path / "ollama")
    snapshot = settings.hub_cache / "models--org--repo" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for quantization in ("Q5_0", "Q8_0"):
        (snapshot / f"m-{quantization}.gguf").touch()
    eight, five = (made(port, f"org/repo:{q}", str(snapshot / f"m-{q}.gguf")) for port, q in ((1, "Q8_0"), (2, "Q5_0")))
    blob = settings.ollama_dir / "blobs" / f"sha256-{'0' * 64}"
    ollama = made(3, "ollama:m:latest", str(blob))
    manifest = settings.ollama_dir / "manifests" / "registry.ollama.ai" / "library" / "m" / "latest"
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'0' * 64}"}
    for file, text in ((blob, ""), (manifest, json.dumps({"layers": [layer]}))):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    with recorded(eight, settings), recorded(five, settings), recorded(ollama, settings):
        assert find_instance(replace(settings, model="org/repo")) == eight
        assert find_instance(replace(settings, model="org/repo:q5_0")) == five
        assert find_instance(replace(settings, model="ollama:m")) == ollama
        assert find_instance(replace(settings, model="ollama:other")) is None


def test_server_on_the_port_of_the_settings_is_preferred(settings: Settings) -> None:
    with recorded(made(1), settings), recorded(made(2), settings), recorded(made(3), settings):
        assert find_instance(replace(settings, port=2)) == made(2)
        assert find_instance(settings) is not None


def test_server_of_all_models_is_found_for_stored_names_only(settings: Settings, tmp_path: Path) -> None:
    settings = replace(settings, hub_cache=tmp_path / "hub")
    snapshot = settings.hub_cache / "models--org--repo" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "m-Q8_0.gguf").touch()
    file = tmp_path / "own.gguf"
    file.touch()
    old, new = made(1, "other:1b"), replace(made(2, str(file), str(file)), serves_all=True)
    with recorded(old, settings), recorded(new, settings):
        assert find_servers(replace(settings, model="org/repo")) == [FoundServer(new, "org/repo:Q8_0")]
        assert find_servers(replace(settings, model=str(file))) == [FoundServer(new, str(file))]
        assert find_servers(replace(settings, model=str(snapshot / "m-Q8_0.gguf"))) == []
        assert find_servers(replace(settings, model="org/missing")) == []


def test_server_that_was_started_with_the_model_is_preferred(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    own, other = made(2, str(file), str(file)), replace(made(1), serves_all=True)
    with recorded(own, settings), recorded(other, settings):
        assert find_servers(replace(settings, model=str(file), port=1)) == [FoundServer(own, str(file))]


def test_service_whose_manager_does_not_listen_is_not_waited_for(settings: Settings, tmp_path: Path) -> None:
    settings = replace(settings, port=free_port())
    assert not asyncio.run(start_service(settings))
    unit = tmp_path / "config/systemd/user/inglenook.socket"
    unit.parent.mkdir(parents=True)
    unit.write_text(f"[Socket]\nListenStream=127.0.0.1:{settings.port}\n")
    assert not asyncio.run(start_service(settings))
