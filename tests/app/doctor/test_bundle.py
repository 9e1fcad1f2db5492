"""The archive of `ingle doctor --bundle` has what a bug report needs, and no secret, name, or text of a chat."""

import json
import logging
import os
import platform
import stat
import subprocess
import zipfile
from getpass import getuser
from pathlib import Path

import pytest

from app.doctor.redaction import redactor
from app.history.history import History
from app.history.records import ChatSettings
from app.process.server_log import LogFile
from app.settings.settings import load_settings
from tests.app.command_line import ingle

KEY, FILE_KEY, HUB_TOKEN, OTHER = "canary-key-1", "canary-key-2", "hf_canaryCanary123", "canary-other-4"
PROMPT = "The canary of the prompt sings."
NAMES = ("about.json", "checks.json", "settings.json", "models.json", "service.json", "log.json")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home with secrets in its settings, environment, log, and chats."""
    home, state = tmp_path / "canary-home", tmp_path / "canary-home" / "state"
    config = home / "inglenook" / "config.toml"
    config.parent.mkdir(parents=True)
    keys = home / "keys"
    keys.write_text(f"{FILE_KEY}\n")
    keys.chmod(0o600)
    config.write_text(
        f'api_key_file = "{keys}"\nhost_names = ["canary-host.lan"]\nhub_token = "{HUB_TOKEN}"\n'
        f'hub_endpoint = "https://canary-name:canary-password@127.0.0.1:9"\nmodel = "{home}/model.gguf"\n'
    )
    config.chmod(0o600)
    with History(state / "history") as history:
        chat = history.chats.create(ChatSettings(system=PROMPT), PROMPT)
        history.messages.add_user_message(chat.id, None, PROMPT)
    (state / "last-run.json").write_text(json.dumps(PROMPT))
    log = LogFile(state, 4645)
    for planted in (KEY, FILE_KEY, OTHER, "Bearer canary-bearer", "sk-canary-unknown-key", str(home / "a")):
        log.handle(logging.makeLogRecord({"msg": f"a request failed: {planted} of {getuser()}@{platform.node()}"}))
    own = {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "INGLE_STATE_DIR": str(state), "INGLE_API_KEY": KEY}
    own |= {"SOME_SERVICE_TOKEN": OTHER, "INGLE_OFFLINE": "1", "HF_TOKEN": "", "INGLE_MODELS_DIR": str(home / "m")}
    return {**os.environ, **own}


def bundle(environment: dict[str, str], path: Path) -> "subprocess.CompletedProcess[bytes]":
    return ingle(environment, "doctor", "--bundle", str(path))


def test_archive_has_no_planted_secret(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "bundle.zip"
    done = bundle(environment, path)
    said = done.stderr.decode()
    assert str(path) in said
    with zipfile.ZipFile(path) as archive:
        assert tuple(archive.namelist()) == NAMES
        contents = {name: archive.read(name).decode() for name in NAMES}
    for name, content in contents.items():
        assert "canary" not in content.lower(), name
        assert platform.node() not in content
        assert name in said
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = json.loads(contents["log.json"])
    assert lines[-1]["message"] == "a request failed: ~/a of (user)@(host)"
    values = {one["name"]: one for one in json.loads(contents["settings.json"])}
    assert values["model"] == {"name": "model", "value": "~/model.gguf", "origin": "~/inglenook/config.toml"}
    assert (values["api_key"]["value"], values["hub_token"]["value"]) == ("(secret)", "(secret)")
    assert values["threads"]["value"] == json.loads(json.dumps(load_settings().threads))
    assert json.loads(contents["about.json"])["packages"]["torch"]
    assert {check["name"] for check in json.loads(contents["checks.json"])} > {"Python", "memory", "port"}


def test_existing_file_is_not_replaced(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("mine")
    done = bundle(environment, path)
    assert done.returncode == 1
    assert b"exists already" in done.stderr
    assert path.read_text() == "mine"


def test_default_name_is_a_new_file_in_this_folder(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    ingle(environment, "doctor", "--bundle")
    [made] = folder.iterdir()
    assert made.name.startswith("ingle-20")
    assert zipfile.is_zipfile(made)


def test_short_and_empty_values_are_not_removed_from_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "a")
    monkeypatch.setenv("OTHER_TOKEN", "")
    redact = redactor(load_settings())
    assert redact({"a": ["banana", 1, None]})["a"][0] == "banana"  # type: ignore[index]
