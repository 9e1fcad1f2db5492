"""Settings files get their bytes back, and changes by others stay."""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from app.connect import undo as undo_module
from app.connect.connection import Target
from app.connect.documents import Document, Format, InvalidFile, Item, KeyPath
from app.connect.json_with_comments import JsonWithComments
from app.connect.settings_file import write_file
from app.connect.undo import Undo, Written
from app.connect.yaml_document import YamlDocument
from tests.support.settings_texts import json_text, yaml_text

FILES, GROUP = 200, 10
COMMENT = re.compile(r"note \d+|end \d+|# [^\r\n]*")
VALUES: Mapping[str, Mapping[KeyPath, object]] = {
    "json": {
        ("env", "ANTHROPIC_MODEL"): "qwen3:8b",
        ("env", "URL"): "http://127.0.0.1:4645",
        ("model",): "ingle/qwen3:8b",
        ("provider", "ingle"): {"options": {"baseURL": "http://127.0.0.1:4645/v1"}, "models": []},
    },
    "json list": {(Item("name", "ingle"),): {"name": "ingle", "models": [{"id": "qwen3:8b"}]}},
    "yaml": {
        ("model",): "openai/qwen3:8b",
        ("openai-api-base",): "http://127.0.0.1:4645/v1",
        ("models", Item("name", "ingle")): {"name": "ingle", "options": {"contextLength": 8}, "roles": ["chat"]},
    },
    "yaml list": {(Item("name", "ingle"),): {"name": "ingle", "model_name": "qwen3:8b"}},
}


def values_of(form: Format, seed: int) -> Mapping[KeyPath, object]:
    return VALUES[f"{form} list" if seed % 5 == 0 else form]


def document_of(form: Format, text: str) -> Document:
    return JsonWithComments(text) if form == "json" else YamlDocument(text)


def data_of(form: Format, text: str) -> object:
    """Return the content of a file. An empty list of models counts as none."""
    data = document_of(form, text).get(())
    return {**data, "models": data["models"] or []} if isinstance(data, dict) and "models" in data else data


@pytest.fixture(autouse=True)
def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of these tests need not survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def written(tmp_path: Path, form: Format, seed: int) -> tuple[Undo, Target, str] | None:
    """Connect a generated file. Returns None if it has another value where an object is needed."""
    text = (json_text if form == "json" else yaml_text)(seed)
    path = tmp_path / f"{form}-{seed}"
    path.write_bytes(text.encode())
    undo, target = Undo(tmp_path / f"state-{form}-{seed}"), Target(path, form, values_of(form, seed))
    try:
        undo.connect("client", [target])
    except InvalidFile as refused:
        assert "cannot be set" in refused.message
        assert path.read_bytes() == text.encode()
        return None
    document = document_of(form, path.read_bytes().decode())
    assert {key: document.get(key) for key in target.values} == target.values
    return undo, target, text


@pytest.mark.share(4, "form")
@pytest.mark.parametrize("first", range(0, FILES, GROUP))
@pytest.mark.parametrize("form", ["json", "yaml"])
def test_disconnect_restores_the_bytes_of_generated_files(tmp_path: Path, form: Format, first: int) -> None:
    tried = 0
    for seed in range(first, first + GROUP):
        if (found := written(tmp_path, form, seed)) is not None:
            undo, target, text = found
            assert undo.is_set_up("client")
            undo.disconnect("client")
            assert target.path.read_bytes() == text.encode(), seed
            tried += 1
    assert tried


@pytest.mark.share(4, "form")
@pytest.mark.parametrize("first", range(0, FILES, GROUP))
@pytest.mark.parametrize("form", ["json", "yaml"])
def test_disconnect_leaves_changes_of_others_in_generated_files(tmp_path: Path, form: Format, first: int) -> None:
    same = tried = 0
    note = "// new\n" if form == "json" else "# new\n"
    for seed in range(first, first + GROUP):
        if (found := written(tmp_path, form, seed)) is None:
            continue
        undo, target, text = found
        changed = target.path.read_bytes().decode()
        mark = "\ufeff" if changed.startswith("\ufeff") else ""
        target.path.write_bytes(f"{mark}{note}{changed.removeprefix(mark)}".encode())
        (file,) = undo.disconnect("client")
        expected, result = f"{mark}{note}{text.removeprefix(mark)}", target.path.read_bytes().decode()
        assert not file.kept, seed
        assert data_of(form, result) == data_of(form, expected) or not data_of(form, expected), seed
        assert COMMENT.findall(result) == COMMENT.findall(expected), seed
        tried += 1
        same += result == expected
    assert same > tried // 4  # the others differ in the blanks of empty objects, or in the last line end


# -- one file


@pytest.fixture
def undo(tmp_path: Path) -> Undo:
    return Undo(tmp_path / "state" / "connect")


def target_of(path: Path, model: str = "qwen3:8b") -> Target:
    return Target(path, "json", {("env", "MODEL"): model, ("theme",): "dark"})


def connected(undo: Undo, path: Path, text: str, model: str = "qwen3:8b") -> Target:
    path.write_bytes(text.encode())
    target = target_of(path, model)
    undo.connect("client", [target])
    return target


def test_values_are_added_after_the_others(undo: Undo, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    connected(undo, path, '{\n  // mine\n  "a": [1],\n  "theme": "light" // x\n}\n')
    expected = '{\n  // mine\n  "a": [1],\n  "theme": "dark", // x\n  "env": {\n    "MODEL": "qwen3:8b"\n  }\n}\n'
    assert path.read_text() == expected


def test_value_that_has_changed_since_is_left_and_reported(undo: Undo, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    connected(undo, path, '{"theme": "light"}\n')
    path.write_text(path.read_text().replace("qwen3:8b", "another"))
    assert undo.is_set_up("client") is False
    (file,) = undo.disconnect("client")
    assert file.kept == ["env.MODEL"]
    assert json.loads(path.read_text()) == {"theme": "light", "env": {"MODEL": "another"}}
    assert undo.is_set_up("client") is None


def test_reformatted_file_is_undone_by_value(undo: Undo, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    connected(undo, path, '{"theme": "light"}\n')
    path.write_text(json.dumps({"new": 1, **json.loads(path.read_text())}, indent=8))
    assert undo.is_set_up("client") is True
    undo.disconnect("client")
    assert json.loads(path.read_text()) == {"new": 1, "theme": "light"}


@pytest.mark.parametrize("edit", ["", "\n\n"])
def test_created_file_and_no_other_is_removed(undo: Undo, tmp_path: Path, edit: str) -> None:
    path = tmp_path / "new" / "settings.json"
    undo.connect("client", [target_of(path)])
    path.write_text(path.read_text() + edit)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    undo.disconnect("client")
    assert not path.exists()


def framed(path: Path) -> Target:
    values: Mapping[KeyPath, object] = {("last",): "ingle", ("providers", "ingle"): {"model": "qwen3:8b", "at": 1}}
    return Target(path, "json", values, frame={("version",): 1}, refreshed=("at",))


def test_values_that_the_client_refreshes_count_as_unchanged(undo: Undo, tmp_path: Path) -> None:
    path = tmp_path / "providers.json"
    undo.connect("client", [framed(path)])
    path.write_text(path.read_text().replace('"at": 1', '"at": 2'))
    assert undo.is_set_up("client") is True
    (file,) = undo.disconnect("client")
    assert not file.kept
    assert not path.exists()


def test_created_file_stays_valid_with_what_others_add(undo: Undo, tmp_path: Path) -> None:
    path = tmp_path / "providers.json"
    undo.connect("client", [framed(path)])
    content = json.loads(path.read_text())
    content["providers"]["other"] = {"model": "x"}
    path.write_text(json.dumps(content))
    undo.disconnect("client")
    assert json.loads(path.read_text()) == {"version": 1, "providers": {"other": {"model": "x"}}}


def test_existing_file_gets_no_frame(undo: Undo, tmp_path: Path) -> None:
    path = tmp_path / "providers.json"
    path.write_text("{}")
    undo.connect("client", [framed(path)])
    assert "version" not in json.loads(path.read_text())


def test_removed_file_stays_removed(undo: Undo, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    connected(undo, path, "{}")
    path.unlink()
    undo.disconnect("client")
    assert not path.exists()


@pytest.mark.parametrize("edit", ["", "// later\n"])
def test_second_connect_replaces_the_first(undo: Undo, tmp_path: Path, edit: str) -> None:
    path = tmp_path / "settings.json"
    text = '{ "theme": "light",\n"env": {} }'
    connected(undo, path, text)
    path.write_text(edit + path.read_text())
    undo.connect("client", [target_of(path, "gemma4:e2b")])
    assert '"MODEL": "gemma4:e2b"' in path.read_text()
    undo.disconnect("client")
    assert path.read_text() == edit + text


def test_projects_and_user_settings_are_undone_together(undo: Undo, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("user.json", "project.json")]
    for path in paths:
        connected(undo, path, "{}\n")
    undo.disconnect("client")
    assert [path.read_text() for path in paths] == ["{}\n", "{}\n"]


def test_symbolic_link_stays_and_its_target_is_replaced(undo: Undo, tmp_path: Path) -> None:
    target, link = tmp_path / "dotfiles.json", tmp_path / "settings.json"
    target.write_text("{}")
    target.chmod(0o640)
    link.symlink_to(target)
    undo.connect("client", [target_of(link)])
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert "MODEL" in target.read_text()
    undo.disconnect("client")
    assert (link.is_symlink(), target.read_text()) == (True, "{}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n  "b": }', "line 2, column 8: a value was expected"),
        (b'{"a" 1}', "line 1, column 6: a colon was expected"),
        (b"{a: 1}", "line 1, column 2: a key in quotes was expected"),
        (b"{} {}", "line 1, column 4: nothing may follow"),
        (b'{"a": 1', "line 1, column 8: a comma or } was expected"),
        (b"\xff{}", "not UTF-8 text at byte 0"),
        (b"[" * 5000, "more than 200 levels"),
        (b'{"env": "text"}', "env.MODEL cannot be set: an object was expected"),
        (b"[]", "env.MODEL cannot be set: an object was expected"),
    ],
)
def test_invalid_file_is_refused_untouched(undo: Undo, tmp_path: Path, content: bytes, message: str) -> None:
    path, other = tmp_path / "settings.json", tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(InvalidFile, match=re.escape(message)):
        undo.connect("client", [target_of(other), target_of(path)])
    assert path.read_bytes() == content
    assert not other.exists()
    assert undo.is_set_up("client") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "line 1, column 6"),
        ("a: b: c\n", "line 1, column 5"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1"),
        ("{a: 1}\n", "the file is in brackets"),
        ("model: |\n  text\n", "model cannot be set: the value has several lines"),
        ("models: [{name: a}]\n", "the list is in brackets"),
        ("x: &x {name: a}\nmodels: [*x]\n", "the list is in brackets"),
        ("base: &b [1]\nmodels: *b\n", "models[name=ingle] cannot be set"),
        ("- a\n", "model cannot be set"),
        ("a: 1\n...\n", "model cannot be set"),
    ],
)
def test_yaml_file_of_an_unusual_form_is_refused_untouched(undo: Undo, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InvalidFile, match=re.escape(message)):
        undo.connect("client", [Target(path, "yaml", VALUES["yaml"])])
    assert path.read_text() == text


def test_read_only_file_is_refused(undo: Undo, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text("{}")
    path.chmod(0o444)
    with pytest.raises(InvalidFile, match="read-only"):
        undo.connect("client", [target_of(path)])
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("{}", 0o444)


def test_folder_is_refused(undo: Undo, tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match="not a regular file"):
        undo.connect("client", [target_of(tmp_path)])


def test_key_is_not_written_to_a_file_that_others_can_read(undo: Undo, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text("{}")
    path.chmod(0o644)
    with pytest.raises(InvalidFile, match="other users can read this file") as refused:
        undo.connect("client", [replace(target_of(path), is_private=True)])
    assert refused.value.remedy == f"chmod 600 {path}"
    assert path.read_text() == "{}"


def test_files_are_private_whatever_the_umask(undo: Undo, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        connected(undo, tmp_path / "settings.json", "{}")
        undo.connect("client", [target_of(tmp_path / "folder" / "new.json")])
    finally:
        os.umask(before)
    created = [path for top in ("state", "folder") for path in (tmp_path / top, *(tmp_path / top).rglob("*"))]
    assert len(created) > 6
    assert {path for path in created if path.stat().st_mode & 0o077} == set()


def test_last_five_copies_are_kept(undo: Undo, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    for number in range(8):
        connected(undo, path, f'{{"number": {number}}}')
        undo.disconnect("client")
    copies = [copy.read_text() for copy in (tmp_path / "state").rglob("*") if copy.is_file()]
    assert sorted(copies) == [f'{{"number": {number}}}' for number in range(3, 8)]


def test_dry_run_writes_nothing(undo: Undo, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text("{}")
    (file,) = undo.connect("client", [target_of(path)], dry=True)
    assert b"MODEL" in (file.after or b"")
    assert [one.name for one in tmp_path.iterdir()] == ["settings.json"]


def test_damaged_record_is_reported(undo: Undo, tmp_path: Path) -> None:
    connected(undo, tmp_path / "settings.json", "{}")
    (tmp_path / "state" / "connect" / "client.json").write_text("{")
    with pytest.raises(InvalidFile, match=r"client\.json"):
        undo.disconnect("client")


def test_settings_can_be_undone_if_the_process_ends_between_file_and_record(
    undo: Undo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"theme": "light"}\n')

    def end(written: Written) -> None:
        write_file(written.path, written.after or b"")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(undo_module, "_apply", end)
        with pytest.raises(KeyboardInterrupt):
            undo.connect("client", [target_of(path)])
    assert "qwen3:8b" in path.read_text()
    undo.disconnect("client")
    assert path.read_text() == '{"theme": "light"}\n'


def test_killed_processes_leave_whole_files_that_can_be_restored() -> None:
    command = [sys.executable, "-m", "tests.torture.killed_connect", "--most", "2"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("could be restored") == 5
