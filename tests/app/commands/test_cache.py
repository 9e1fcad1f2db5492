"""`ingle cache`: listing, clearing, verification, and the confirmation prompt, in a temporary folder."""

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.cli import ingle, main
from app.commands import cache
from app.errors import AppError, ModelNotFound
from app.generation.reply_token_file import FILE_NAME
from app.models.catalog import load_catalog
from engine.config import BLOCK_SIZE
from engine.kv.blocks import BlockKey
from engine.kv.disk.folder import About, model_folder
from engine.kv.disk.quota import GIB, Quota
from engine.kv.disk.store import DiskStore

BLOCK_BYTES = 1000
ENTRY = load_catalog().entries[0]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INGLE_KV_DISK_DIR", str(tmp_path / "kv"))
    monkeypatch.delenv("INGLE_KV_DISK_GB", raising=False)
    return tmp_path / "kv"


def keep(root: Path, number: int, about: About, blocks: int) -> Path:
    """Write a segment file of `blocks` blocks. Returns the folder of its model."""
    fingerprint = bytes([number]) * 32
    store = DiskStore(model_folder(root, fingerprint, about), fingerprint, [BLOCK_BYTES], Quota(root, GIB))
    keys = [BlockKey(bytes([number, place]) * 16) for place in range(blocks)]
    data = memoryview(bytes(BLOCK_BYTES))
    assert store.write(0, keys[0], [(key, tuple(range(BLOCK_SIZE)), data) for key in keys])
    return store.folder


@pytest.fixture
def kept(root: Path) -> list[Path]:
    """Caches of two models, the first of which was used last."""
    folders = [
        keep(root, 1, About(ENTRY.name, ENTRY.sha256, "cpu", "float16"), 3),
        keep(root, 2, About("my.gguf\x1b[2J", "ab" * 32, "cpu", "int8"), 2),
    ]
    for folder, used in zip(folders, (2_000_000_000, 1_000_000_000), strict=True):
        for file in folder.glob("??/*.run"):
            os.utime(file, (used, used))
    (root / FILE_NAME).write_bytes(b"replies")
    (root / f"{FILE_NAME}-wal").write_bytes(b"wal")
    return folders


def invoke(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(ingle, ["cache", *arguments], input=answer)


def runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.run"))


def test_ls_prints_a_table(kept: list[Path], root: Path) -> None:
    first, *rows, empty, total = invoke("ls").stdout.splitlines()
    assert re.split("  +", first) == ["ID", "MODEL", "BACKEND", "KV TYPE", "TOKENS", "SIZE", "LAST USED"]
    cells = [re.split("  +", row) for row in rows]
    assert cells[0][:-1] == ["01010101", ENTRY.name, "cpu", "float16", "48", "11.2 kB"]
    assert cells[0][-1].startswith("2033-05-1")
    assert cells[1][:-1] == ["02020202", "my.gguf[2J", "cpu", "int8", "32", "10.2 kB"]
    assert empty == ""
    assert re.fullmatch(rf"21\.4 kB of at most [\d.]+ GB in {re.escape(str(root))}", total)


def test_ls_prints_the_limit_of_the_setting(kept: list[Path], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_KV_DISK_GB", "1.5")
    assert invoke("ls").stdout.endswith(f"\n21.4 kB of at most 1.5 GB in {root}\n")
    monkeypatch.setenv("INGLE_KV_DISK_GB", "0")
    assert invoke("ls").stdout.endswith(f"\n21.4 kB and the cache is disabled (INGLE_KV_DISK_GB) in {root}\n")
    assert json.loads(invoke("ls", "--json").stdout)["limit"] == 0


def test_ls_prints_json_on_request(kept: list[Path], root: Path) -> None:
    listed = json.loads(invoke("ls", "--json").stdout)
    assert listed.keys() == {"folder", "size", "limit", "models"}
    assert (listed["folder"], listed["size"]) == (str(root), sum(model["size"] for model in listed["models"]))
    assert listed["models"][0] == {
        "id": "01" * 16,
        "model": ENTRY.name,
        "sha256": ENTRY.sha256,
        "backend": "cpu",
        "kv_type": "float16",
        "made": listed["models"][0]["made"],
        "files": 1,
        "size": 8192 + 3 * BLOCK_BYTES,
        "blocks": 3,
        "tokens": 48,
        "used": "2033-05-18T03:33:20+00:00",
        "folder": str(kept[0]),
    }


def test_commands_accept_an_empty_cache(root: Path) -> None:
    assert invoke("ls").stdout.startswith("0 B of at most ")
    assert json.loads(invoke("ls", "--json").stdout)["models"] == []
    assert invoke("verify").exit_code == 0
    assert invoke("clear", "--yes").exit_code == 0
    assert not root.exists()


def test_clearing_one_model_does_not_ask(kept: list[Path], root: Path) -> None:
    done = invoke("clear", ENTRY.aliases[0] if ENTRY.aliases else ENTRY.name)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"11.2 kB freed in {root}.\n"
    assert (len(runs(kept[0])), len(runs(kept[1]))) == (0, 1)
    assert not (root / FILE_NAME).exists()
    assert not (root / f"{FILE_NAME}-wal").exists()


def test_clear_finds_a_catalog_model_used_by_path(root: Path) -> None:
    folder = keep(root, 3, About("renamed.gguf", ENTRY.sha256), 1)
    assert invoke("clear", ENTRY.name).exit_code == 0
    assert not runs(folder)


@pytest.mark.parametrize("name", ["02020202", "some/where/my.gguf\x1b[2J"])
def test_clear_accepts_an_id_or_a_path(kept: list[Path], name: str) -> None:
    assert invoke("clear", name).exit_code == 0
    assert (len(runs(kept[0])), len(runs(kept[1]))) == (1, 0)


def test_clear_without_an_entry_is_not_found(kept: list[Path], root: Path) -> None:
    done = invoke("clear", "nothing")
    assert isinstance(done.exception, ModelNotFound)
    assert (root / FILE_NAME).exists()
    assert sum(len(runs(folder)) for folder in kept) == 2


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        @staticmethod
        def isatty() -> bool:
            return True

    class System:
        stdin = Terminal

    monkeypatch.setattr(cache, "sys", System)


@pytest.mark.parametrize(("answer", "status", "left"), [("y\n", 0, 0), ("n\n", 1, 2), ("\n", 1, 2), ("", 1, 2)])
def test_clearing_all_models_asks_first(
    kept: list[Path], root: Path, monkeypatch: pytest.MonkeyPatch, answer: str, status: int, left: int
) -> None:
    on_a_terminal(monkeypatch)
    done = invoke("clear", answer=answer)
    assert done.exit_code == status
    assert "Clear the cache of every model (21.4 kB)?" in done.stderr
    assert done.stdout == ""
    assert sum(len(runs(folder)) for folder in kept) == left
    assert (root / FILE_NAME).exists() == bool(left)


def test_clearing_all_models_without_a_terminal_needs_yes(kept: list[Path], root: Path) -> None:
    done = invoke("clear", answer="y\n")
    assert isinstance(done.exception, AppError)
    assert done.exception.remedy == "ingle cache clear --yes"
    assert sum(len(runs(folder)) for folder in kept) == 2
    assert invoke("clear", "--yes").stderr == f"21.4 kB freed in {root}.\n"
    assert sum(len(runs(folder)) for folder in kept) == 0
    assert {path.name for path in root.rglob("*") if path.is_file()} == {"about.json"}


def test_files_that_cannot_be_deleted_are_an_error(kept: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    done = invoke("clear", "--yes")
    assert isinstance(done.exception, AppError)
    assert "4 files" in done.exception.message
    assert done.stderr.startswith("0 B freed")


def test_verify_accepts_good_files(kept: list[Path]) -> None:
    done = invoke("verify")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "Files: 2, 21.4 kB. Damaged: 0.\n")
    assert invoke("verify", "-q", "--delete").stderr == ""
    assert sum(len(runs(folder)) for folder in kept) == 2


def test_verify_lists_damaged_files_and_deletes_them_on_request(kept: list[Path]) -> None:
    [bad], [good] = map(runs, kept)
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    for _ in range(2):
        done = invoke("verify")
        assert (done.exit_code, done.stdout) == (1, f"{bad}: block 2 is damaged\n")
    done = invoke("verify", "--delete")
    assert (done.exit_code, done.stdout) == (1, f"{bad}: block 2 is damaged\n")
    assert done.stderr == "Files: 2, 21.4 kB. Damaged: 1, deleted: 1.\n"
    assert not bad.exists()
    assert good.exists()
    assert invoke("verify").exit_code == 0


def test_damaged_file_that_cannot_be_deleted_is_an_error(kept: list[Path]) -> None:
    [path] = runs(kept[0])
    path.unlink()
    path.mkdir()
    done = invoke("verify", "--delete", "-q")
    assert isinstance(done.exception, AppError)
    assert done.stdout.startswith(f"{path}: ")
    assert path.exists()


@pytest.mark.parametrize("name", ["ls", "clear", "verify"])
def test_every_subcommand_has_help_with_examples(name: str) -> None:
    output = invoke(name, "--help").output
    assert f"Examples:\n    ingle cache {name}" in output


def test_error_message_has_a_remedy(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ingle", "cache", "clear", "nothing"])
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    assert main() == 3
    assert (
        capfd.readouterr().err == "error: the cache has no entry for nothing\ntry: ingle cache ls lists the entries.\n"
    )
