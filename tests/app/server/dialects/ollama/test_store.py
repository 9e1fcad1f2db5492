"""Downloading and deleting models through the real ollama client."""

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import httpx
import ollama
import pytest

from app.generation.template import ChatTemplateRenderer
from app.models.pulls import PullProgress, Pulls, PullState
from app.models.stored_model import Removal
from app.settings.settings import load_settings
from app.text.tokenizer import Tokenizer
from tests.app.server.dialects.ollama.real_client import client
from tests.app.server.live_server import LiveServer, controlled_engine


class OtherPulls(Pulls):
    """Simulates the download of one model in three progress events. Other names go to the real `Pulls`."""

    def __init__(self, models_dir: Path) -> None:
        super().__init__(load_settings(models_dir=models_dir, offline=True))
        self.deleted: list[str] = []

    async def pull(self, name: str) -> AsyncGenerator[PullProgress]:
        if name != "tiny:1m":
            async for event in super().pull(name):
                yield event
            return
        yield PullProgress(name, PullState.WAITING)
        yield PullProgress(name, PullState.RUNNING, "Fetching tiny:1m", 40, 100)
        yield PullProgress(name, PullState.DONE, done=100, total=100)

    async def delete(self, name: str) -> list[Removal]:
        if name != "tiny:1m":
            return await super().delete(name)
        self.deleted.append(name)
        return []


@pytest.fixture(scope="module")
def pulls(tmp_path_factory: pytest.TempPathFactory) -> OtherPulls:
    return OtherPulls(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, renderer: ChatTemplateRenderer, pulls: OtherPulls) -> Iterator[LiveServer]:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer, pulls=pulls) as server:
        yield server


def test_model_is_downloaded_with_progress(server: LiveServer) -> None:
    with client(server) as api:
        reported = list(api.pull("tiny:1m", stream=True))
        assert [(one.status, one.completed, one.total) for one in reported] == [
            ("pulling manifest", None, None), ("Fetching tiny:1m", 40, 100), ("success", None, None)
        ]  # fmt: skip
        assert (reported[1].digest or "").startswith("sha256:")
        assert api.pull("tiny:1m").status == "success"


@pytest.mark.parametrize("name", ["nope", "/etc/passwd", "./a.gguf", "https://127.0.0.1/a.gguf", "../a"])
def test_only_model_names_are_accepted_for_pulls(server: LiveServer, name: str) -> None:
    with client(server) as api:
        for ask in (api.pull, api.delete):
            with pytest.raises(ollama.ResponseError, match="no model is called") as refused:
                ask(name)
            assert refused.value.status_code == 404


def test_model_is_deleted_unless_it_is_loaded(server: LiveServer, pulls: OtherPulls) -> None:
    with client(server) as api:
        assert api.delete("tiny:1m").status == "success"
        assert pulls.deleted == ["tiny:1m"]
        with pytest.raises(ollama.ResponseError, match="hash is loaded") as refused:
            api.delete("hash")
    assert refused.value.status_code == 409


@pytest.mark.parametrize("path", ["/api/create", "/api/copy", "/api/push"])
def test_models_cannot_be_created_copied_or_pushed(server: LiveServer, path: str) -> None:
    refused = httpx.post(f"{server.url}{path}", json={"model": "a", "from": "hash", "stream": True}, trust_env=False)
    assert (refused.status_code, list(refused.json())) == (400, ["error"])
    assert "does not create, copy, or push models" in refused.json()["error"]


def test_server_without_downloads_refuses_pulls(hash_server: LiveServer) -> None:
    refused = httpx.post(f"{hash_server.url}/api/pull", json={"model": "tiny:1m"}, trust_env=False)
    assert refused.json() == {"error": "This server does not download or delete models. Use ingle pull and ingle rm."}
