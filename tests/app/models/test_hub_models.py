"""Models by repository name: download from a fake hub, lookup in the shared cache, and removal."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from app.errors import AppError, IntegrityError, ModelNotFound, NoSpace, Offline
from app.models import digests, hub_cache, hub_listing
from app.models.catalog import HubSource
from app.models.digests import digest_of
from app.models.hub_models import HubModels
from app.models.model_header import read_header
from app.models.repository import RepositoryName
from app.models.sources import pull
from app.models.store import ModelStore
from app.models.transfer import transfer
from app.progress import SilentProgress
from app.settings.settings import Settings
from engine import system_memory
from quant.errors import ModelFileError
from quant.safetensors_shards import INDEX, SafetensorsShards
from tests.app.models.checkpoint_folder import OTHERS, SHARDS, SMALL, sharded_files, whole_files, write
from tests.app.models.fake_hub import REVISION, FakeHub, serve
from tests.app.models.tiny_model import files_below, settings_in

REPO = "org/Tiny-Chat"
NAME = RepositoryName(REPO)
GGUF = "tiny-Q4_0.gguf"


@pytest.fixture
def fake_hub() -> Iterator[FakeHub]:
    """A hub with a checkpoint of two shards, among files that are not downloaded."""
    with serve() as served:
        served.repositories[REPO] = {**OTHERS, **sharded_files()}
        yield served


@pytest.fixture
def settings(fake_hub: FakeHub, tmp_path: Path) -> Settings:
    return settings_in(tmp_path, hub_endpoint=fake_hub.address)


def fetched(hub: FakeHub) -> list[str]:
    """Return the names of the downloaded files."""
    return [path.partition(f"/{REVISION}/")[2] for path, _ in hub.downloads() if "/resolve/" in path]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_files_of_the_checkpoint_are_downloaded(fake_hub: FakeHub, settings: Settings) -> None:
    stored = pull(REPO, settings)
    files = sharded_files()
    assert contents(stored.path) == files
    assert sorted(fetched(fake_hub)) == sorted(files)
    assert (stored.name, stored.quantization, stored.sha256) == (REPO, "bfloat16", None)
    assert stored.size == sum(map(len, files.values())) - len(files[INDEX])
    assert stored.stored_at
    with SafetensorsShards(stored.path) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "b"]


def test_stored_model_is_found_without_the_network(fake_hub: FakeHub, settings: Settings, tmp_path: Path) -> None:
    stored = pull(REPO, settings)
    assert [*ModelStore(settings).hub_models.unfinished()] == []
    asked = len(fake_hub.requests)
    assert pull(f"hf:{REPO}", settings) == stored
    assert ModelStore(settings_in(tmp_path)).resolve(REPO) == stored
    assert ModelStore(settings).entries() == [stored]
    assert len(fake_hub.requests) == asked


def test_huggingface_hub_finds_the_model_in_its_cache(settings: Settings) -> None:
    stored = pull(REPO, settings)
    cache = str(settings.hub_cache)
    found = huggingface_hub.snapshot_download(REPO, cache_dir=cache, local_files_only=True)
    assert Path(found) == stored.path
    assert not huggingface_hub.scan_cache_dir(cache).warnings


def test_interrupted_download_resumes_at_its_file(
    fake_hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = fake_hub.repositories[REPO].pop(SHARDS[1])
    fake_hub.repositories[REPO][SHARDS[1]] = second[:-1] + b"!"
    honest = fake_hub._list({**fake_hub.repositories[REPO], SHARDS[1]: second})
    fake_hub.listing = honest
    monkeypatch.setattr(transfer, "MAX_PARALLEL", 1)
    with pytest.raises(IntegrityError, match=f"{SHARDS[1]}: the file has sha256"):
        pull(REPO, settings)
    there = set(contents(hub_cache.snapshot_folder(settings.hub_cache, REPO, REVISION)))
    assert SHARDS[0] in there
    assert ModelStore(settings).hub_models.find(NAME) is None
    assert ModelStore(settings).entries() == []
    fake_hub.repositories[REPO][SHARDS[1]] = second
    done = len(fetched(fake_hub))
    stored = pull(REPO, settings)
    assert sorted(fetched(fake_hub)[done:]) == sorted(set(sharded_files()) - there)
    assert contents(stored.path) == sharded_files()


def test_partial_file_resumes_and_needs_space_for_the_rest_only(
    fake_hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = sharded_files()
    shard = weights[SHARDS[1]]
    digest = hashlib.sha256(shard).hexdigest()
    partial = hub_cache.blob_path(settings.hub_cache, HubSource(REPO, REVISION, SHARDS[1]), f"{digest}.partial")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(shard[:100])
    usage = shutil.disk_usage(tmp_path)
    room = sum(len(weights[name]) for name in SHARDS) - 100
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=room))
    assert contents(pull(REPO, settings).path) == weights
    assert fake_hub.ranges_asked_for() == ["bytes=100-"]
    assert not partial.exists()


def test_small_file_is_verified_by_its_git_id(fake_hub: FakeHub, settings: Settings) -> None:
    fake_hub.listing = fake_hub._list(fake_hub.repositories[REPO])
    fake_hub.repositories[REPO]["config.json"] = SMALL["config.json"].replace(b"llama", b"lloma")
    with pytest.raises(IntegrityError, match="sha1"):
        pull(REPO, settings)
    kept = contents(settings.hub_cache)
    assert not [name for name in kept if name.endswith(f"/{REVISION}/config.json")]
    assert fake_hub.repositories[REPO]["config.json"] not in kept.values()


@pytest.mark.parametrize(("free", "is_warned"), [(10**9, False), (100, True)])
def test_pull_warns_about_a_model_larger_than_memory(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, free: int, is_warned: bool
) -> None:
    lines: list[str] = []
    progress = SilentProgress()
    monkeypatch.setattr(progress, "say", lines.append)
    monkeypatch.setattr(system_memory, "available_memory", lambda: free)
    pull(REPO, settings, progress)
    assert any(f"Check with: ingle fit {REPO}" in line for line in lines) == is_warned


def test_space_is_checked_for_all_files_together(
    fake_hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = sum(len(sharded_files()[shard]) for shard in SHARDS)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=weights - 1))
    with pytest.raises(NoSpace):
        pull(REPO, settings)
    assert not set(fetched(fake_hub)) & set(SHARDS)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=weights))
    assert contents(pull(REPO, settings).path) == sharded_files()


def test_shard_missing_in_the_repository_is_an_error(fake_hub: FakeHub, settings: Settings) -> None:
    del fake_hub.repositories[REPO][SHARDS[0]]
    with pytest.raises(IntegrityError, match=f"names {SHARDS[0]}, which the repository does not have"):
        pull(REPO, settings)


@pytest.mark.parametrize("shard", ["../../evil.safetensors", "/etc/passwd", "pytorch_model.bin"])
def test_index_with_an_unsafe_file_name_is_refused(fake_hub: FakeHub, settings: Settings, shard: str) -> None:
    fake_hub.repositories[REPO][INDEX] = json.dumps({"weight_map": {"a": shard}}).encode()
    with pytest.raises(ModelFileError, match="not a valid name for a shard"):
        pull(REPO, settings)
    assert set(fetched(fake_hub)) <= {*SMALL, INDEX}


def test_gguf_of_a_quantization_is_downloaded_with_all_parts(fake_hub: FakeHub, settings: Settings) -> None:
    parts = {f"Q8_0/tiny-Q8_0-0000{n}-of-00002.gguf": bytes([n]) * 200 for n in (1, 2)}
    fake_hub.repositories[REPO] |= {GGUF: b"GGUF" * 100, **parts}
    stored = pull(f"{REPO}:q8_0", settings)
    assert sorted(fetched(fake_hub)) == sorted(parts)  # sorted, because the files are downloaded in parallel
    assert (stored.name, stored.quantization, stored.size) == (f"{REPO}:Q8_0", "Q8_0", 400)
    assert [path.read_bytes() for path in stored.weights()] == list(parts.values())
    assert pull(f"{REPO}:Q4_0", settings).path.name == GGUF
    assert {model.name for model in ModelStore(settings).entries()} == {f"{REPO}:Q4_0", f"{REPO}:Q8_0"}


def test_missing_quantization_lists_the_existing_ones(settings: Settings) -> None:
    with pytest.raises(ModelNotFound, match="is not a model of this repository") as caught:
        pull(f"{REPO}:Q4_0", settings)
    assert caught.value.remedy == f"Choose one of: {REPO}."


def test_missing_repository_is_an_error(settings: Settings) -> None:
    with pytest.raises(AppError, match="org/other does not exist on the Hub, or is private"):
        pull("org/other", settings)


def test_offline_mode_sends_no_request(fake_hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(Offline, match="is not stored, and offline mode is on"):
        pull(REPO, settings_in(tmp_path, hub_endpoint=fake_hub.address, offline=True))
    assert fake_hub.requests == []


FORGED = [
    b"",
    b"[]",
    b'{"sha": 1, "siblings": []}',
    b'{"sha": "../..", "siblings": []}',
    b'{"sha": "%s", "siblings": {}}' % (b"0" * 40),
]


@pytest.mark.parametrize("listing", FORGED)
def test_invalid_file_list_is_an_error(fake_hub: FakeHub, settings: Settings, listing: bytes) -> None:
    fake_hub.listing = listing
    with pytest.raises(AppError, match="is invalid"):
        pull(REPO, settings)


def test_invalid_configuration_is_reported_when_the_model_is_used(fake_hub: FakeHub, settings: Settings) -> None:
    fake_hub.repositories[REPO]["config.json"] = b"[]"
    stored = pull(REPO, settings)
    assert (stored.name, stored.quantization) == (REPO, None)
    with pytest.raises(ModelFileError, match=r"config\.json: it is not an object"):
        read_header(stored)


def test_oversized_file_list_is_refused(fake_hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_listing, "MAX_BYTES", 100)
    with pytest.raises(AppError, match="has more than 100 bytes"):
        pull(REPO, settings)


HOSTILE = (
    "../x", "/x", ".git/config", "a//b", "a\\b", "con fig.json", "a/../../x", "..", "a/..", "~/x", "C:/x", "C:x",
    "\\\\host\\x",     "nul", "CON.json", "a/aux.gguf", "com1", "lpt9.txt",
    "x.", "x ", "x/.", "x:stream", "a\0b", "a\nb", "\u202ex", "x?",
    "*", "|x", "x" * 300, "/".join(["x"] * 300), "",
)  # fmt: skip


def test_unsafe_file_names_are_ignored(fake_hub: FakeHub, settings: Settings, tmp_path: Path) -> None:
    """The file names are unsafe on POSIX or Windows. The remaining files are written only inside the model stores."""
    hostile = {name + suffix: b"x" * 200 for name in HOSTILE for suffix in ("", "/m-Q8_0.gguf")}
    # a safe name, because "console" and "com10" are not device names of Windows
    console = {"console/com10.gguf": b"y" * 200}
    fake_hub.repositories[REPO] = {**hostile, **console}
    assert set(hub_listing.list_repository(REPO, settings, SilentProgress()).files) == {*console}
    pull(REPO, settings)
    assert {path.name for path in tmp_path.iterdir()} == {"models", "hub"}
    inside = {path.relative_to(settings.hub_cache).parts[0] for path in settings.hub_cache.rglob("*")}
    assert inside == {"models--org--Tiny-Chat"}


def test_files_with_unsafe_digests_are_ignored(fake_hub: FakeHub, settings: Settings) -> None:
    """The digest is the name of the file with the bytes."""
    unsafe = ("../" * 20 + "x", "/" + "a" * 39, "A" * 40, "a" * 39, "")
    entries = [{"rfilename": f"{n}.json", "size": 9, "blobId": digest} for n, digest in enumerate(unsafe)]
    entries += [{"rfilename": f"{n}.gguf", "lfs": {"sha256": it, "size": 9}} for n, it in enumerate(unsafe)]
    entries.append({"rfilename": "good.gguf", "lfs": {"sha256": "a" * 64, "size": 9}})
    fake_hub.listing = json.dumps({"sha": REVISION, "siblings": entries}).encode()
    assert set(hub_listing.list_repository(REPO, settings, SilentProgress()).files) == {"good.gguf"}


def fill_cache(cache: Path, files: dict[str, bytes], *, with_ref: bool = True) -> Path:
    """Create a repository in the Hugging Face cache, as another tool would."""
    folder = cache / f"models--{REPO.replace('/', '--')}"
    snapshot = folder / "snapshots" / REVISION
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    if with_ref:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(REVISION)
    return snapshot


@pytest.mark.parametrize("with_ref", [True, False])
def test_models_of_other_tools_in_the_cache_are_used(tmp_path: Path, with_ref: bool) -> None:
    settings = settings_in(tmp_path)
    snapshot = fill_cache(settings.hub_cache, {**whole_files(), **OTHERS, GGUF: b"GGUF" * 100}, with_ref=with_ref)
    stored = pull(REPO, settings)
    assert (stored.path, stored.stored_at) == (snapshot, None)
    assert [model.name for model in ModelStore(settings).entries()] == [REPO, f"{REPO}:Q4_0"]
    assert len(digest_of(stored.weights(), tmp_path / "records", SilentProgress())) == 64


# the shard is verified by its sha256, config.json by its git id
@pytest.mark.parametrize("name", [SHARDS[1], "config.json"])
def test_damaged_file_is_downloaded_again_or_refused(
    fake_hub: FakeHub, settings: Settings, tmp_path: Path, name: str
) -> None:
    path = pull(REPO, settings).path / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"!")
    with pytest.raises(IntegrityError, match=f"{name} is damaged"):
        pull(REPO, settings_in(tmp_path, offline=True))
    done = len(fetched(fake_hub))
    assert contents(pull(REPO, settings).path) == sharded_files()
    assert fetched(fake_hub)[done:] == [name]


def test_bytes_of_another_commit_are_not_downloaded_again(
    fake_hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = pull(REPO, settings)
    done = len(fetched(fake_hub))
    shutil.rmtree(stored.path)
    assert contents(pull(REPO, settings).path) == sharded_files()
    assert fetched(fake_hub)[done:] == []
    blob = (stored.path / SHARDS[0]).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    shutil.rmtree(stored.path)
    assert contents(pull(REPO, settings).path) == sharded_files()
    assert fetched(fake_hub)[done:] == [SHARDS[0]]


def test_models_of_other_tools_are_not_removed(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    snapshot = fill_cache(settings.hub_cache, whole_files())
    with pytest.raises(AppError, match="was not downloaded by ingle") as caught:
        ModelStore(settings).remove(REPO)
    assert caught.value.remedy == f"hf cache rm model/{REPO}"
    assert contents(snapshot) == whole_files()


def test_checkpoint_with_a_missing_shard_is_not_listed(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    files = sharded_files()
    del files[SHARDS[1]]
    fill_cache(settings.hub_cache, files)
    assert ModelStore(settings).entries() == []
    with pytest.raises(ModelNotFound, match="not on this machine yet"):
        ModelStore(settings).resolve(REPO)


@pytest.mark.parametrize("content", [b"../../elsewhere", b"0" * 40, b"", b"."])
def test_invalid_reference_is_ignored(tmp_path: Path, content: bytes) -> None:
    settings = settings_in(tmp_path)
    snapshot = fill_cache(settings.hub_cache, whole_files())
    write(settings.hub_cache / "elsewhere", whole_files())
    write(snapshot.parent, whole_files())
    (snapshot.parents[1] / "refs" / "main").write_bytes(content)
    assert ModelStore(settings).entries() == []


def test_removal_deletes_only_the_pulled_files(fake_hub: FakeHub, settings: Settings) -> None:
    fake_hub.repositories[REPO][GGUF] = b"GGUF" * 100
    folder, file = pull(REPO, settings), pull(f"{REPO}:Q4_0", settings)
    before = files_below(settings.hub_cache)
    planned = ModelStore(settings).remove(REPO, really=False)
    assert files_below(settings.hub_cache) == before
    [removal] = ModelStore(settings).remove(REPO)
    assert planned == [removal]
    assert (removal.freed, removal.shared) == (sum(map(len, sharded_files().values())), True)
    assert removal.path == folder.path
    assert file.path.is_file()
    assert [model.name for model in ModelStore(settings).entries()] == [f"{REPO}:Q4_0"]
    ModelStore(settings).remove(REPO)  # the name now refers to the GGUF file
    with pytest.raises(ModelNotFound):
        ModelStore(settings).remove(REPO)
    assert not any(name.endswith(".gguf") for name in files_below(settings.hub_cache))


def test_removal_deletes_an_unfinished_download(fake_hub: FakeHub, settings: Settings) -> None:
    fake_hub.listing = fake_hub._list(fake_hub.repositories[REPO])
    shard = fake_hub.repositories[REPO].pop(SHARDS[1])
    with pytest.raises(AppError, match="does not exist"):
        pull(REPO, settings)
    blob = hub_cache.blob_path(settings.hub_cache, HubSource(REPO, REVISION, SHARDS[1]), "0" * 64)
    blob.with_name(f"{blob.name}.partial").write_bytes(shard[:50])
    # parallel downloads may have written other files as well
    there = sum(path.stat().st_size for path in blob.parent.iterdir())
    assert there >= 50
    assert ModelStore(settings).entries() == []
    [begun] = ModelStore(settings).hub_models.unfinished()
    [removal] = ModelStore(settings).remove(REPO)
    assert (begun.name, begun.arrived, removal.freed) == (REPO, there, there)
    assert [*ModelStore(settings).hub_models.unfinished()] == []
    assert files_below(settings.hub_cache) == set()
    with pytest.raises(ModelNotFound):
        ModelStore(settings).remove(REPO)


@pytest.mark.parametrize("record", [b"", b"[]", b"{}", b'{"revision": 1}'])
def test_invalid_record_is_ignored(settings: Settings, record: bytes) -> None:
    stored = pull(REPO, settings)
    [path] = (settings.models_dir / ".pulled").glob("*.json")
    path.write_bytes(record)
    assert pull(REPO, settings).path == stored.path
    assert HubModels(settings.hub_cache, settings.models_dir).pulled(NAME) is None


def test_digests_of_a_download_are_recorded(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> str:
        raise AssertionError("a file was read")

    stored = pull(REPO, settings)
    weights = [path for path in stored.weights() if path.suffix == ".safetensors"]
    monkeypatch.setattr(digests, "sha256_of", never)
    assert len(digest_of(weights, settings.models_dir / digests.DIGESTS, SilentProgress())) == 64
    lines = "".join(f"{name} {hashlib.sha256(sharded_files()[name]).hexdigest()}\n" for name in SHARDS)
    assert (
        digest_of(weights, settings.models_dir / digests.DIGESTS, SilentProgress())
        == hashlib.sha256(lines.encode()).hexdigest()
    )


def test_changed_byte_of_weights_or_configuration_changes_the_fingerprint(tmp_path: Path) -> None:
    found = set()
    for number, (name, old, new) in enumerate(
        [
            ("config.json", b"", b""),
            ("config.json", b"llama", b"lloma"),
            (SHARDS[1], b"\0", b"\1"),
            ("tokenizer.json", b"{}", b"[]"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = sharded_files()
        files[name] = files[name].replace(old, new) if old else files[name]
        write(folder, files)
        stored = ModelStore(settings_in(tmp_path)).resolve(str(folder))
        found.add(digest_of(stored.weights(), tmp_path / "records", SilentProgress()))
    assert len(found) == 3
