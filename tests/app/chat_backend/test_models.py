"""Tests for the models of the chat: lists, fit, and recommendations."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from app.chat_backend import model_queries
from app.chat_backend.client import TerminalClient
from app.chat_backend.engine.connection import EngineConnection
from app.chat_backend.model_lists import without_embedding_models
from app.chat_backend.models import ChatModels
from app.cli import ingle
from app.errors import Offline
from app.history.history import History
from app.models.catalog import HubSource
from app.models.decode_rate import DecodeRate, remember_rate
from app.models.families import active_bytes, load_families
from app.models.store import ModelStore
from app.models.transfer import incoming
from app.settings.settings import Settings
from quant.errors import InglenookError
from tests.app.models.fake_hub import FakeHub, serve
from tests.engine.models.tiny_llama import make
from tui.client import ClientError
from tui.engine_types import ModelInfo, Recommendation


async def said(*words: str) -> tuple[int, bytes, bytes]:
    """Run an `ingle` command in this process, and return its exit status, stdout, and stderr."""
    result = await asyncio.to_thread(CliRunner().invoke, ingle, words)
    problem = f"error: {result.exception}\n" if isinstance(result.exception, InglenookError) else ""
    return result.exit_code, result.stdout.encode(), f"{result.stderr}{problem}".encode()


@pytest.fixture(autouse=True)
def commands(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace child processes: run commands in this process, with the settings of the test."""
    monkeypatch.setattr(model_queries, "run_ingle", said)
    for folder in ("models_dir", "hub_cache", "state_dir", "ollama_dir", "lmstudio_dir"):
        monkeypatch.setenv(f"INGLE_{folder.upper()}", str(getattr(settings, folder)))


@asynccontextmanager
async def models_of(settings: Settings, endpoint: str = "") -> AsyncIterator[ChatModels]:
    client = TerminalClient(settings, History(None), {"stay": False}, endpoint)
    try:
        yield client.models
    finally:
        await client.close()


def recommended(settings: Settings, endpoint: str = "") -> Recommendation | None:
    async def main() -> Recommendation | None:
        async with models_of(settings, endpoint) as models:
            return await models.recommended()

    return asyncio.run(main())


def test_best_fitting_model_is_recommended_to_new_users(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = load_families()
    content = make(tmp_path, head_dim=32).path.read_bytes()
    with serve() as hub:
        online = replace(settings, offline=False, hub_endpoint=hub.address)
        hub.repositories = {one.repository.repo: {"m-Q4_K_M.gguf": content} for one in families.recommended}
        monkeypatch.setenv("INGLE_HUB_ENDPOINT", hub.address)
        found = recommended(online)
        assert found is not None
        assert found.model in {one.name for one in families.recommended}
        assert found.verdict.startswith("fits: 512 context; needs ")
        asked = hub.sent
        assert recommended(settings) is None  # the settings are offline
        assert recommended(replace(online, origins={**online.origins, "model": "--model"})) is None
        assert recommended(online, "http://127.0.0.1:9/v1") is None
        assert hub.sent == asked
    assert recommended(online) is None  # the Hub does not answer


KNOWN = next(one for one in load_families() if one.repository.repo.endswith("GGUF"))
REPO = KNOWN.repository.repo


@pytest.fixture
def online(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Settings, FakeHub]]:
    """A fake Hub that has two quantizations of a model with a short name."""
    content = make(tmp_path, head_dim=32).path.read_bytes()
    with serve() as hub:
        hub.repositories = {REPO: {"m-Q4_K_M.gguf": content, "m-Q8_0.gguf": content + bytes(32)}}
        monkeypatch.setenv("INGLE_HUB_ENDPOINT", hub.address)
        yield replace(settings, offline=False, hub_endpoint=hub.address), hub


def test_speeds_follow_from_the_remembered_decode_rate(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, they are those of a slow CPU."""
    monkeypatch.setattr("app.chat_backend.models.memory_without_gpu", lambda: 64 << 30)

    async def speeds() -> dict[str, float | None]:
        async with models_of(settings) as models:
            return {one.name: one.speed for one in await models.catalog() if one.fits is not False}

    assert asyncio.run(speeds())[KNOWN.name] == pytest.approx(15e9 / KNOWN.usual_size)
    remember_rate(settings.state_dir, DecodeRate("cpu", 2.0 * KNOWN.usual_size))
    assert asyncio.run(speeds())[KNOWN.name] == 2.0


def test_speed_of_a_mixture_of_experts_counts_its_active_weights(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.chat_backend.model_lists.is_likely_to_fit", lambda size, memory: True)
    remember_rate(settings.state_dir, DecodeRate("cpu", 10e9))

    async def main() -> None:
        async with models_of(settings) as models:
            [mixture] = [one for one in await models.catalog() if one.name == "qwen3:30b"]
            assert mixture.size is not None
            assert mixture.speed == pytest.approx(10e9 / (mixture.size / 10))

    asyncio.run(main())


def test_recommended_model_is_not_expected_to_be_slow(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.chat_backend.model_lists.is_likely_to_fit", lambda size, memory: True)
    best, *others = load_families().recommended
    active = active_bytes(best.repository.repo, best.usual_size)
    assert active is not None
    assert active < best.usual_size / 5

    async def marked() -> list[str]:
        async with models_of(settings) as models:
            return [one.name for one in await models.catalog() if one.is_recommended]

    monkeypatch.setattr("app.chat_backend.models.memory_without_gpu", lambda: 64_000_000_000)
    assert asyncio.run(marked()) == [best.name]
    rate = 4.9 * active
    remember_rate(settings.state_dir, DecodeRate("cpu", rate))
    read = ((one.name, active_bytes(one.repository.repo, one.usual_size)) for one in others)
    assert asyncio.run(marked()) == [next(name for name, size in read if size is None or 5.0 * size <= rate)]


def test_model_is_listed_before_and_after_its_download(online: tuple[Settings, FakeHub]) -> None:
    settings, hub = online
    size = len(hub.repositories[REPO]["m-Q4_K_M.gguf"])

    async def main() -> None:
        async with models_of(settings) as models:
            [before] = [one for one in await models.catalog() if one.name == KNOWN.name]
            assert (before.installed, before.size, before.is_estimate) == (False, KNOWN.usual_size, True)
            assert (before.quantization, before.license) == ("Q4_K_M", KNOWN.license)
            assert await models.installed() == []
            async with aclosing(models.pull(KNOWN.name)) as steps:
                async for _ in steps:
                    pass
            [after] = [one for one in await models.catalog() if one.installed]
            assert (after.name, after.size, after.is_estimate) == (KNOWN.name, size, False)
            [here] = await models.installed()
            assert (here.name, here.quantization, here.license) == (f"{REPO}:Q4_K_M", "Q4_K_M", "mit")
            variants = {one.quantization: one.installed for one in await models.variants(REPO)}
            assert variants == {"Q4_K_M": True, "Q8_0": False}
            [found] = (await models.search(REPO.partition("/")[2])).models
            assert found.installed
            await models.delete(KNOWN.name)
            assert await models.installed() == []
            assert not any(one.installed for one in await models.catalog())

    asyncio.run(main())


def test_model_is_found_by_any_name_offline(online: tuple[Settings, FakeHub], tmp_path: Path) -> None:
    settings, hub = online
    path = make(tmp_path, head_dim=32).path

    async def main() -> None:
        async with models_of(settings) as models:
            for name in (KNOWN.name, f"{REPO}:Q4_K_M"):
                known = await models.find(name)
                assert (known.name, known.size, known.installed) == (name, KNOWN.usual_size, False)
            assert await models.find(f"{REPO}:Q8_0") == ModelInfo(f"{REPO}:Q8_0")
            assert await models.find("https://example.org/m.gguf#sha256=" + "0" * 64) == ModelInfo(
                "https://example.org/m.gguf#sha256=" + "0" * 64
            )
            assert (await models.find(str(path))).installed
            with pytest.raises(ClientError, match="no model is called nosuch:7b"):
                await models.find("nosuch:7b")
            assert hub.sent == 0
            async with aclosing(models.pull(KNOWN.name)) as steps:
                async for _ in steps:
                    pass
            assert (await models.find(KNOWN.name)).installed
        async with models_of(settings, "http://127.0.0.1:9/v1") as models:
            assert await models.find("any") == ModelInfo("any", elsewhere=True)

    asyncio.run(main())


def test_model_from_a_path_is_listed_until_the_program_ends(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, head_dim=32).path
    monkeypatch.setattr(EngineConnection, "answering", str(path))
    monkeypatch.setattr("app.chat_backend.models.memory_without_gpu", lambda: 64 << 30)

    async def main() -> None:
        async with models_of(settings) as models:
            size = path.stat().st_size
            listed = ModelInfo(str(path), size=size, installed=True, loaded=True, is_own=True, speed=15e9 / size)
            assert await models.installed() == [listed]
            monkeypatch.setattr(EngineConnection, "answering", "qwen3:4b")
            assert await models.installed() == [replace(listed, loaded=False)]
            path.unlink()
            assert await models.installed() == []

    asyncio.run(main())


def test_reason_names_the_setting_that_prevents_downloads(settings: Settings) -> None:
    async def reason(settings: Settings, endpoint: str = "") -> str:
        async with models_of(settings, endpoint) as models:
            return models.offline_reason()

    offline = replace(settings, offline=True, origins={**settings.origins, "offline": "INGLE_OFFLINE"})
    assert asyncio.run(reason(offline)) == "offline mode is on (INGLE_OFFLINE)"
    assert asyncio.run(reason(offline, "http://127.0.0.1:9/v1")) == ""
    assert asyncio.run(reason(replace(settings, offline=False))) == ""


def test_catalog_leaves_out_embedding_models(settings: Settings) -> None:
    embedding = {known.name for known in load_families() if known.kind == "embedding"}

    async def main() -> None:
        async with models_of(settings) as models:
            names = {one.name for one in await models.catalog()}
            assert KNOWN.name in names
            assert embedding
            assert not embedding & names

    asyncio.run(main())


def test_free_disk_is_that_of_the_fuller_folder(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "free_space", lambda folder: {"models_dir": 5, "hub_cache": 3}[folder.name])

    async def main() -> int | None:
        async with models_of(settings) as models:
            return await models.free_disk()

    assert asyncio.run(main()) == 3


def test_partial_download_is_listed(online: tuple[Settings, FakeHub]) -> None:
    settings, hub = online
    hub.pace = 0.05
    hub.repositories[REPO]["m-Q4_K_M.gguf"] += bytes(1 << 20)

    async def main() -> None:
        async with models_of(settings) as models, aclosing(models.pull(KNOWN.name)) as steps:
            async for step in steps:
                if step.done:
                    break
        async with models_of(settings) as models:
            [left] = await models.installed()
            assert left.name == f"{REPO}:Q4_K_M"
            assert not left.installed
            assert left.arrived
            assert left.size == len(hub.repositories[REPO]["m-Q4_K_M.gguf"])
            [known] = [one for one in await models.catalog() if one.arrived]
            assert (known.name, known.arrived) == (KNOWN.name, left.arrived)
            assert (known.size, known.is_estimate) == (left.size, False)
            arrived = {one.quantization: one.arrived for one in await models.variants(REPO)}
            assert arrived == {"Q4_K_M": left.arrived, "Q8_0": None}

    asyncio.run(main())


def test_offline_search_finds_catalog_models(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_OFFLINE", "1")

    async def main() -> None:
        async with models_of(settings) as models:
            finds = await models.search(KNOWN.name)
            assert finds.models
            rows = [one for one in await models.catalog() if KNOWN.name in one.name]
            assert {one.name for one in finds.models} == {one.name for one in rows}
            assert all(one in rows for one in finds.models)
            assert not any(one.is_repository for one in finds.models)
            assert finds.note.startswith("offline mode is on")

    asyncio.run(main())


def test_fit_is_reported_before_the_download(online: tuple[Settings, FakeHub]) -> None:
    settings, hub = online

    async def main() -> None:
        async with models_of(settings) as models:
            for name in (KNOWN.name, f"{REPO}:Q8_0"):
                fit = await models.fit(name)
                assert fit.verdict.startswith("fits: 512 context; needs ")
                assert fit.is_possible
        async with models_of(replace(settings, context=128)) as models:
            assert (await models.fit(KNOWN.name)).verdict.startswith("fits: 128 context; needs ")
            hub.refusal = (404, "RepoNotFound")
            with pytest.raises(ClientError, match="some/other"):
                await models.fit("some/other")

    asyncio.run(main())


def test_too_large_model_does_not_fit(online: tuple[Settings, FakeHub], monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = online

    async def reclaimable_memory(connection: EngineConnection) -> int:
        return 100_000

    monkeypatch.setattr(EngineConnection, "reclaimable_memory", reclaimable_memory)

    async def main() -> None:
        async with models_of(settings) as models:
            fit = await models.fit(KNOWN.name)
            assert fit.verdict.startswith("does not fit: needs ")
            assert "100.0 kB free" in fit.verdict
            assert not fit.is_possible
            assert {one.fits for one in await models.catalog()} == {False}
            assert [one.fits for one in await models.variants(REPO)] == [False, False]
            assert [one.fits for one in (await models.search("a")).models] == [False]

    asyncio.run(main())


def test_partial_catalog_download_is_listed_and_deleted(settings: Settings) -> None:
    store = ModelStore(settings)
    entry = next(iter(store.catalog))
    [source] = [one for one in entry.sources if isinstance(one, HubSource)]

    async def main() -> None:
        async with models_of(settings) as models:
            with suppress(InglenookError), store.receiving(entry, source) as incoming:
                incoming.write(b"begun")
                raise Offline("the connection broke")
            for listed in (await models.installed(), await models.catalog()):
                assert [one.arrived for one in listed if one.name == entry.name] == [len(b"begun")]
            await models.delete(entry.name)
            assert await models.installed() == []

    asyncio.run(main())


def test_installed_embedding_models_are_not_offered(settings: Settings) -> None:
    families = load_families()
    embedding = next(known for known in families if known.kind == "embedding")
    names = ["llama3.2:1b", embedding.name, f"{embedding.repository.repo}:Q8_0"]
    offered = without_embedding_models([ModelInfo(name, installed=True) for name in names], ModelStore(settings))
    assert [one.name for one in offered] == ["llama3.2:1b"]
