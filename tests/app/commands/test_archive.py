"""`ingle export` and `ingle import`: a round trip, merging, and damaged or hostile archives."""

import json
import os
import stat
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from app.history import chat_import
from app.history.chat_file import as_json
from app.history.history import History
from app.history.records import (
    Attachment,
    ChatSettings,
    Preset,
    Role,
    State,
    StoredMessage,
    StoredUsage,
    ToolStep,
    Trim,
    WhenFull,
)
from tests.app.command_line import ingle

CONFIG = 'model = "qwen3:4b"\napi_key = ["canary-key"]\n# canary comment\n[model_aliases]\n"gpt-4o" = "*"\n'


class Home:
    """A home with a history and a configuration."""

    def __init__(self, folder: Path, config: str = "") -> None:
        self.state, self.config = folder / "state", folder / "inglenook" / "config.toml"
        self.config.parent.mkdir(parents=True)
        self.config.write_text(config)
        self.config.chmod(0o600)
        own = {
            "INGLE_STATE_DIR": str(self.state),
            "XDG_CONFIG_HOME": str(folder),
            "INGLE_MODELS_DIR": str(folder / "m"),
        }
        self.environment = {**os.environ, **own, "HF_HUB_CACHE": str(folder / "hub"), "HOME": str(folder)}

    def ingle(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        done = ingle(self.environment, *arguments)
        return subprocess.CompletedProcess(arguments, done.returncode, done.stdout.decode(), done.stderr.decode())

    def history(self) -> History:
        return History(self.state / "history")

    def content(self) -> bytes:
        """Return all that a user can observe of the chats, and the presets."""
        with self.history() as history:
            return as_json(history.with_messages()) + repr(history.inputs.presets()).encode()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home with chats that use every field."""
    home = Home(tmp_path / "first", CONFIG)
    with home.history() as history:
        for number in range(3):
            chat = history.chats.create(
                ChatSettings(system=f"S{number}", when_full=WhenFull.STOP), created=100.0 + number
            )
            ids: list[int] = []
            for place, (parent, role) in enumerate([(None, Role.USER), (0, Role.ASSISTANT), (0, Role.ASSISTANT)]):
                ids.append(
                    history.messages.add(
                        StoredMessage(
                            id=0, chat=chat.id, parent=None if parent is None else ids[parent], role=role,
                            text=f"text {number} {place} \u2028é", attachments=(Attachment("a.txt", "b"),),
                            reasoning="why", reasoning_seconds=1.25, steps=(ToolStep("f", "{}", "r"),), model="m",
                            state=State.CUT, usage=StoredUsage(reply_tokens=place), created=200.0 + place,
                        )
                    ).id
                )  # fmt: skip
            history.chats.show(chat.id, ids[1])
            history.chats.trim(chat.id, Trim((ids[0],), summaries={ids[0]: "in short"}))
            history.chats.give_title(chat.id, f"generated {number}")
        history.chats.rename(1, "given")
        history.chats.pin(2, pinned=True)
        history.chats.archive(3, archived=True)
        history.inputs.save_preset(Preset("short", ChatSettings(system="Be short.")))
    return home


def exported(home: Home, tmp_path: Path) -> Path:
    path = tmp_path / "backup.zip"
    done = home.ingle("export", str(path))
    assert done.returncode == 0, done.stderr
    return path


def test_import_into_an_empty_home_gives_the_same_chats(home: Home, tmp_path: Path) -> None:
    path, other = exported(home, tmp_path), Home(tmp_path / "second")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    done = other.ingle("import", str(path), "--settings")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "3 chats were added." in done.stderr
    assert other.content() == home.content()
    assert 'model = "qwen3:4b"' in other.config.read_text()
    assert '[model_aliases]\ngpt-4o = "*"' in other.config.read_text()
    again = tmp_path / "again.zip"
    other.ingle("export", str(again))
    with zipfile.ZipFile(path) as first, zipfile.ZipFile(again) as second:
        assert [first.read(name) for name in first.namelist()] == [second.read(name) for name in second.namelist()]


def test_archive_has_no_keys(home: Home, tmp_path: Path) -> None:
    with zipfile.ZipFile(exported(home, tmp_path)) as archive:
        contents = b"".join(archive.read(name) for name in archive.namelist())
    assert b"canary" not in contents
    assert b"qwen3:4b" in contents


def test_existing_chats_are_not_doubled_and_settings_are_left_out_without_a_terminal(
    home: Home, tmp_path: Path
) -> None:
    path, before = exported(home, tmp_path), home.content()
    home.config.write_text('model = "mine"\n')
    done = home.ingle("import", str(path))
    assert "0 chats were added; 3 were here already." in done.stderr
    assert "  model = 'qwen3:4b'\n" in done.stderr
    assert "--settings takes them" in done.stderr
    assert home.content() == before
    assert home.config.read_text() == 'model = "mine"\n'


def test_missing_models_are_listed_with_the_command(home: Home, tmp_path: Path) -> None:
    models = [{"name": "smollm2:135m", "size": 1}, {"name": "$(reboot)"}, {"name": "--help"}, {"name": "org/repo:Q4_0"}]
    path = changed(exported(home, tmp_path), {"models.json": json.dumps(models).encode()})
    done = home.ingle("import", str(path))
    assert done.stderr.endswith("  ingle pull smollm2:135m org/repo:Q4_0\n")


def test_exports_of_the_chat_are_imported(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    with home.history() as history:
        file.write_bytes(as_json(history.with_messages()))
    other = Home(tmp_path / "second")
    assert "3 chats were added." in other.ingle("import", str(file)).stderr


def changed(path: Path, members: Mapping[str, bytes]) -> Path:
    """Return a copy of an archive with other contents of some members."""
    other = path.with_name("changed.zip")
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()} | dict(members)
    with zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return other


def truncated(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-200])
    return path


def flipped(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[120] ^= 255
    path.write_bytes(bytes(content))
    return path


NO_CHATS = b'{"format": "inglenook-chat", "version": 1, "chats": []}'
HOSTILE: Mapping[str, Callable[[Path], Path]] = {
    "slip": lambda path: changed(path, {"../../evil": b"x"}),
    "absolute": lambda path: changed(path, {"/tmp/evil": b"x"}),  # noqa: S108  # never written
    "bomb": lambda path: changed(path, {"chats.json": NO_CHATS + b" " * (20 << 20)}),
    "large settings": lambda path: changed(path, {"settings.toml": b"#" * (1 << 20) + b"#"}),
    "newer": lambda path: changed(path, {"about.json": b'{"format": "inglenook-archive", "version": 2}'}),
    "other format": lambda path: changed(path, {"about.json": b'{"format": "other", "version": 1}'}),
    "no JSON": lambda path: changed(path, {"chats.json": b"{"}),
    "wrong types": lambda path: changed(
        path, {"chats.json": b'{"format": "inglenook-chat", "version": 1, "chats": 1}'}
    ),
    "deep": lambda path: changed(path, {"models.json": b"[" * 100_000}),
    "wrong preset": lambda path: changed(path, {"presets.json": b'[{"name": 1}]'}),
    "wrong TOML": lambda path: changed(path, {"settings.toml": b"\xff"}),
    "unknown setting": lambda path: changed(path, {"settings.toml": b"evil = 1"}),
    "wrong setting": lambda path: changed(path, {"settings.toml": b'port = "x"'}),
    "key": lambda path: changed(path, {"settings.toml": b'api_key = ["x"]'}),
    "truncated": truncated,
    "flipped": flipped,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_damaged_and_hostile_archives_change_nothing(kind: str, home: Home, tmp_path: Path) -> None:
    path, other = HOSTILE[kind](exported(home, tmp_path)), Home(tmp_path / "second", "threads = 1\n")
    done = other.ingle("import", str(path), "--settings")
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert other.config.read_text() == "threads = 1\n"
    assert not other.state.exists()


def test_interrupted_import_leaves_the_old_state(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = exported(home, tmp_path), Home(tmp_path / "second")
    before, add = other.content(), chat_import._add_chat
    count = iter(range(9))

    def interrupted(*arguments: object) -> object:
        if next(count) == 2:
            raise KeyboardInterrupt
        return add(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(chat_import, "_add_chat", interrupted)
    assert other.ingle("import", str(path), "--settings").returncode == 130
    assert other.content() == before
    assert other.config.read_text() == ""
    monkeypatch.undo()
    assert other.ingle("import", str(path)).returncode == 0
    assert other.content() == home.content()


def test_import_into_a_history_that_cannot_be_written_fails(home: Home, tmp_path: Path) -> None:
    path, other = exported(home, tmp_path), Home(tmp_path / "second")
    other.state.write_text("in the way")
    done = other.ingle("import", str(path))
    assert done.returncode == 1
    assert "chats were added" not in done.stderr


def test_existing_file_is_not_replaced(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text("mine")
    assert home.ingle("export", str(path)).returncode == 1
    assert path.read_text() == "mine"
    assert home.ingle("import", str(tmp_path / "missing")).returncode == 1
