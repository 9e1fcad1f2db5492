"""The root folder of the disk cache: the list of models, reports of damage, and deletion of cache files only."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from engine.config import BLOCK_SIZE
from engine.kv.blocks import BlockKey
from engine.kv.disk.folder import (
    ABOUT,
    About,
    ClearResult,
    cached_models,
    clear,
    delete,
    find_cached_models,
    find_damage,
    model_folder,
    resolve_limit,
    segment_files,
)
from engine.kv.disk.quota import GIB, Quota
from engine.kv.disk.store import DiskStore

BLOCK_BYTES = (64, 4096 + 24)
TINY = About("tiny:1k", "ab" * 32, "cpu", "float16")


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(2, "big") * 16)


def store(root: Path, fingerprint: bytes = b"\x01" * 32, about: About = TINY) -> DiskStore:
    return DiskStore(model_folder(root, fingerprint, about), fingerprint, BLOCK_BYTES, Quota(root, GIB))


def write(store: DiskStore, segment: int, count: int, group: int = 0) -> int:
    """Write blocks of a segment whose first key is derived from `segment`. Its high byte determines the shard."""
    data = memoryview(bytes([segment % 255 + 1]) * BLOCK_BYTES[group])
    blocks = [(key(segment + number), tuple(range(BLOCK_SIZE)), data) for number in range(count)]
    return store.write(group, key(segment), blocks)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def all_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_model_folder_is_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = model_folder(tmp_path / "cache" / "kv", b"\x01" * 32, TINY)
    finally:
        os.umask(before)
    assert folder == tmp_path / "cache" / "kv" / ("01" * 16)
    assert [mode(path) for path in (folder.parent, folder, folder / ABOUT)] == [0o700, 0o700, 0o600]
    assert all_below(folder) == {ABOUT}


def test_description_keeps_its_creation_time_and_gets_a_new_name(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, b"\x01" * 32, TINY)
    assert json.loads((folder / ABOUT).read_text())["made"].endswith("Z")
    (folder / ABOUT).write_text(json.dumps({"model": "old", "made": "2026-01-01T00:00:00Z", "more": 1, "backend": 2}))
    model_folder(tmp_path, b"\x01" * 32, TINY)
    assert json.loads((folder / ABOUT).read_text()) == {
        "model": "tiny:1k",
        "sha256": "ab" * 32,
        "backend": "cpu",
        "kv_type": "float16",
        "made": "2026-01-01T00:00:00Z",
    }
    written = (folder / ABOUT).stat().st_ino
    model_folder(tmp_path, b"\x01" * 32, TINY)
    assert (folder / ABOUT).stat().st_ino == written


def test_model_folder_returns_the_path_even_if_it_cannot_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert model_folder(tmp_path / "file", b"\x01" * 32, TINY) == tmp_path / "file" / ("01" * 16)

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    assert list(model_folder(tmp_path, b"\x02" * 32, TINY).iterdir()) == []


def test_cached_models_lists_files_blocks_and_tokens(tmp_path: Path) -> None:
    first, second = store(tmp_path), store(tmp_path, b"\x02" * 32, About("other"))
    model_folder(tmp_path, b"\x03" * 32, About("empty"))
    write(first, 1000, 5)
    write(first, 2000, 3)
    write(first, 1000, 4, group=1)
    write(second, 1000, 2)
    (bad,) = second.folder.glob("??/*.run")
    for used, file in enumerate(segment_files(tmp_path)):
        os.utime(file.path, ns=(used, used))
    os.utime(bad, ns=(7_000, 7_000))
    other, tiny = cached_models(tmp_path)
    assert (tiny.about.model, tiny.about.kv_type, tiny.fingerprint) == ("tiny:1k", "float16", "01" * 16)
    assert (tiny.files, tiny.blocks, tiny.tokens) == (3, 12, 8 * BLOCK_SIZE)
    assert tiny.size == sum(path.stat().st_size for path in tiny.folder.glob("??/*.run"))
    assert (other.about.model, other.blocks, other.used) == ("other", 2, 7_000)
    bad.write_bytes(b"not a file!")
    (other.folder / ABOUT).write_bytes(b"\xff[")
    other = cached_models(tmp_path)[0]
    assert (other.about, other.files, other.size, other.blocks) == (About(), 1, 11, 0)


def test_models_are_found_by_name_digest_and_fingerprint(tmp_path: Path) -> None:
    for number, name in enumerate(("tiny:1k", "tiny:1k", "other"), 1):
        about = About(name, "cd" * 32 if name == "other" else "")
        write(store(tmp_path, bytes([number]) * 32, about), 1, 1)
    models = cached_models(tmp_path)

    def chosen(*asked: str) -> set[str]:
        return {model.fingerprint[:2] for model in find_cached_models(models, *asked)}

    assert chosen("tiny:1k") == {"01", "02"}
    assert chosen("another name", "cd" * 32) == {"03"}
    assert chosen("0303") == chosen("03" * 16) == {"03"}
    assert chosen("030") == chosen("") == chosen("nothing") == set()


def test_clear_deletes_only_cache_files_and_counts_the_bytes(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for segment in range(0, 3000, 256):
        write(kept, segment, 2)
    write(store(tmp_path, b"\x02" * 32), 0, 1)
    shard = kept.folder / "00"
    (shard / "half.tmp").write_bytes(b"12345")
    (shard / "notes.txt").touch()
    (kept.folder / "photos").mkdir()
    (kept.folder / "photos" / "x.run").touch()
    (tmp_path / "mine" / "00").mkdir(parents=True)
    (tmp_path / "mine" / "00" / "y.run").touch()
    (tmp_path / ("09" * 16)).symlink_to(kept.folder)
    (kept.folder / "ff").symlink_to(tmp_path / "mine" / "00")
    models = cached_models(tmp_path)
    assert {model.fingerprint for model in models} == {"01" * 16, "02" * 16}
    size = next(model.size for model in models if model.folder == kept.folder)
    assert clear(kept.folder) == ClearResult(freed=size + 5)
    assert all_below(kept.folder) == {
        ABOUT, "photos", "photos/x.run", "ff", shard.name, f"{shard.name}/notes.txt",
    }  # fmt: skip
    assert [model.fingerprint for model in cached_models(tmp_path)] == ["02" * 16]
    assert all(file.path.name != "y.run" for file in segment_files(tmp_path))
    assert (tmp_path / "mine" / "00" / "y.run").exists()
    assert clear(kept.folder) == clear(tmp_path / "nowhere") == ClearResult()


def test_store_in_use_continues_after_clear(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = store(tmp_path)
    write(kept, 1000, 3)
    assert len(kept.find(0, key(1000))) == 3
    assert clear(kept.folder).left == 0
    assert kept.find(0, key(1000)) == {}
    assert write(kept, 1000, 2) == 2 * BLOCK_BYTES[0]
    assert kept.find(0, key(1000)).keys() == {key(1000), key(1001)}
    [model] = cached_models(tmp_path)
    assert (model.about.model, model.blocks) == ("tiny:1k", 2)
    assert caplog.records == []


def test_clear_works_while_another_thread_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = store(tmp_path)
    ended = threading.Event()

    def keep_writing() -> None:
        for segment in range(0, 40_000, 100):
            write(kept, segment, 1)
            kept.find(0, key(segment))
        ended.set()

    writing = threading.Thread(target=keep_writing)
    writing.start()
    cleared = ClearResult()
    while not ended.is_set():
        cleared += clear(kept.folder)
    writing.join()
    cleared += clear(kept.folder)
    assert cleared.left == 0
    assert cleared.freed > 0
    assert cached_models(tmp_path) == []
    assert not kept.is_paused
    assert caplog.records == []


def test_clear_counts_files_that_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store(tmp_path)
    write(kept, 1000, 1)

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert clear(kept.folder) == ClearResult(left=1)
    assert delete(tmp_path / "nothing") == ClearResult()


def test_find_damage_names_the_problem(tmp_path: Path) -> None:
    kept, other = store(tmp_path), store(tmp_path, b"\x02" * 32)
    write(kept, 1000, 3)
    write(other, 1000, 3)
    [good], [foreign] = (list(one.folder.glob("??/*.run")) for one in (kept, other))
    assert find_damage(good) == find_damage(foreign) == ""

    def content_is(content: bytes) -> str:
        good.write_bytes(content)
        return find_damage(good)

    content = good.read_bytes()
    assert content_is(content[:-1] + b"\x00") == "block 2 is damaged"
    assert content_is(content[:-1]) == "truncated"
    assert content_is(foreign.read_bytes()) == "it belongs to another model"
    assert content_is(content) == ""
    moved = good.with_name("03e8ffff" + good.name[8:])
    moved.write_bytes(content)
    moved.chmod(0o600)
    assert find_damage(moved) == "it belongs to another segment"
    moved.chmod(0o644)
    assert find_damage(moved) == "other users can read or write it"
    moved.unlink()
    assert find_damage(moved) == ""
    moved.symlink_to(good)
    assert find_damage(moved) == "a symbolic link"


def test_limit_is_the_setting_or_automatic(tmp_path: Path) -> None:
    assert resolve_limit(tmp_path, 5, 9) == 5
    assert 0 < resolve_limit(tmp_path / "not" / "there", None, 0) <= 100 * GIB


def test_missing_root_folder_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kv").symlink_to(tmp_path / "nowhere")
    kept = store(tmp_path / "kv")
    assert write(kept, 1000, 1) == 0
    assert kept.is_paused
    assert len(caplog.records) == 1
