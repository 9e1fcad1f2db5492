"""Whether a model fits in memory, computed from stored files and from the headers of files on a fake hub."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.errors import IntegrityError, ModelNotFound, Offline
from app.models import fit as module
from app.models import remote_headers
from app.models.fit import compare_with_plan, fit_model, in_thousands, verdict
from app.models.load.loaded_model import load_model
from app.models.sources import pull
from app.models.store import ModelStore
from app.progress import SilentProgress
from app.settings.settings import Settings
from engine.device import Needs
from engine.errors import OutOfMemory
from engine.fit import CacheFit, Fit
from engine.kv import budget
from quant.errors import GGUFError
from tests.app.models import tiny_chat
from tests.app.models.fake_hub import FakeHub, Mishap, serve
from tests.app.models.tiny_model import settings_in
from tests.engine.checkpoints.quantized_folders import KINDS, quantized_folder
from tests.engine.models.tiny_llama import make

GGUF, FOLDER = "org/Tiny-GGUF", "org/Tiny"
PLENTY = 1 << 30


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of two repositories: one has two GGUF files, one four times as large; the other has a sharded
    checkpoint.
    """
    place, folder = tmp_path_factory.mktemp("gguf"), tmp_path_factory.mktemp("folder")
    tiny_chat.save(folder, shard_size="40KB")
    large = make(place, head_dim=32, mlp=768, vocab=2000).path.read_bytes()
    small = make(place, head_dim=32, mlp=192, vocab=2000, types={"token_embd": "Q4_0"}).path.read_bytes()
    checkpoint = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {GGUF: {"tiny-F32.gguf": large, "tiny-Q4_0.gguf": small}, FOLDER: checkpoint}


@pytest.fixture
def hub(files: dict[str, dict[str, bytes]]) -> Iterator[FakeHub]:
    with serve() as served:
        served.repositories = dict(files)
        yield served


@pytest.fixture
def settings(hub: FakeHub, tmp_path: Path) -> Settings:
    return settings_in(tmp_path, hub_endpoint=hub.address)


@pytest.mark.parametrize("ranges", [True, False], ids=["parts", "no parts"])
@pytest.mark.parametrize("name", [f"{GGUF}:F32", FOLDER])
def test_fit_by_headers_equals_fit_by_files(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch, name: str, ranges: bool
) -> None:
    monkeypatch.setattr(remote_headers, "_FIRST_BYTES", 300)  # fewer bytes than any header has
    hub.ranges = ranges
    found = fit_model(name, settings, memory=PLENTY)
    assert not found.is_stored
    assert [*settings.hub_cache.rglob("*")] == []
    if ranges:
        assert hub.sent < sum(map(len, hub.repositories[name.partition(":")[0]].values())) / 2
    stored = pull(name, settings)
    whole = fit_model(name, settings, memory=PLENTY)
    assert whole.is_stored
    assert (whole.fit, whole.size) == (found.fit, found.size)
    assert whole.size == stored.size


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", KINDS)
def test_fit_by_headers_handles_every_quantization(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setattr(remote_headers, "_FIRST_BYTES", 300)
    monkeypatch.setattr(remote_headers, "_SMALL_BYTES", 500)  # fewer bytes than such a tiny model has
    folder = quantized_folder(tmp_path, kind).path
    hub.repositories["org/Few-bits"] = {path.name: path.read_bytes() for path in folder.iterdir()}
    found = fit_model("org/Few-bits", settings, memory=PLENTY)
    assert found.fit == fit_model(str(folder), settings, memory=PLENTY).fit
    assert hub.sent < folder.joinpath("model.safetensors").stat().st_size


def test_smaller_quantization_is_suggested_if_it_fits(hub: FakeHub, settings: Settings) -> None:
    large, small = (fit_model(f"{GGUF}:{kind}", settings, memory=PLENTY) for kind in ("F32", "Q4_0"))
    assert (large.smaller, large.is_possible) == ("", True)
    between = (large.fit.needed + small.fit.needed) // 2
    tight = fit_model(f"{GGUF}:F32", settings, memory=between)
    assert not tight.is_possible
    assert tight.smaller == f"{GGUF}:Q4_0"
    assert verdict(tight).endswith(f"free; try {GGUF}:Q4_0")
    assert fit_model(f"{GGUF}:F32", settings, memory=between - large.fit.needed // 2).smaller == ""
    pull(f"{GGUF}:F32", settings)
    assert fit_model(f"{GGUF}:F32", settings, memory=between).smaller == f"{GGUF}:Q4_0"


def test_size_is_estimated_if_the_hub_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(Offline) as problem:
        fit_model("qwen3:8b", settings_in(tmp_path))
    assert problem.value.remedy == (
        "By its number of weights, qwen3:8b takes about 5.1 GB. Check the network for exact numbers."
    )


def test_unknown_model_is_not_found(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        fit_model(GGUF, settings_in(tmp_path, offline=True))
    with pytest.raises(ModelNotFound):
        fit_model("no such model", settings)
    with pytest.raises(Offline):
        fit_model(GGUF, settings_in(tmp_path))


def test_invalid_header_is_refused(hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    content = hub.repositories[GGUF]["tiny-F32.gguf"]
    hub.repositories[GGUF] = {"tiny-F32.gguf": content[:4] + b"\xff" * 60 + content[64:]}
    with pytest.raises(GGUFError):
        fit_model(GGUF, settings)


def test_response_with_a_wrong_range_is_refused(hub: FakeHub, settings: Settings) -> None:
    hub.sent_range = "bytes 7-100/1000"
    with pytest.raises(IntegrityError, match="a different part"):
        fit_model(f"{GGUF}:F32", settings)


def test_lost_connection_is_retried(hub: FakeHub, settings: Settings) -> None:
    hub.mishaps.extend([Mishap(cut_at=100), Mishap(status=503)])
    assert fit_model(f"{GGUF}:F32", settings, memory=PLENTY).is_possible


def test_error_for_a_model_that_does_not_fit_suggests_smaller_ones(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = pull(f"{GGUF}:F32", settings)
    large, small = (fit_model(f"{GGUF}:{kind}", settings, memory=PLENTY) for kind in ("F32", "Q4_0"))
    between = (large.fit.needed + small.fit.needed) // 2
    monkeypatch.setattr(budget, "available_memory", lambda: between)
    with pytest.raises(OutOfMemory, match="does not fit: it needs") as refusal:
        load_model(stored, settings, SilentProgress())
    assert refusal.value.remedy == f"try {GGUF}:Q4_0"
    (alone,) = ModelStore(settings).entries()
    with pytest.raises(OutOfMemory) as refusal:
        load_model(alone, replace(settings, offline=True), SilentProgress())
    assert refusal.value.remedy


@pytest.mark.parametrize(("taken", "is_reported"), [(1000, False), (1020, False), (1200, True), (700, True)])
def test_unexpected_memory_use_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, taken: int, is_reported: bool
) -> None:
    amounts = iter((5_000_000_000, 5_000_000_000 + taken * 1_000_000))
    monkeypatch.setattr(module, "resident_bytes", lambda: next(amounts))
    cache = CacheFit("f16", {None: 1}, 512, 300_000_000, 100_000_000)
    plan = Fit("cpu", PLENTY, Needs(900_000_000, 0), (cache,), 512, 512)
    with caplog.at_level(logging.DEBUG), compare_with_plan(plan, "It"):
        pass
    expected = f"It takes {taken / 1000 if taken >= 1000 else taken:.1f} "
    assert bool(caplog.messages) == is_reported
    assert all(line.startswith(expected) and line.endswith("planned 1.0 GB") for line in caplog.messages)


def test_verdict_names_the_longest_context_first() -> None:
    caches = tuple(CacheFit(name, {None: 1}, context, 2, 1) for name, context in (("bf16", 23_456), ("fp8", 46_912)))
    plan = Fit("cuda", 9_800_000_000, Needs(8_000_000_000, 0), caches, 131_072, 512)
    found = module.ModelFit("a", 1, True, plan, None, "", False)
    assert verdict(found) == "fits: 46k context with FP8 KV, 23k with BF16; needs 8.0 GB, 9.8 GB free"
    assert [in_thousands(9_999), in_thousands(131_072)] == ["9,999", "131k"]
