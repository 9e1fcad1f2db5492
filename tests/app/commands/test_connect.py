"""`ingle connect` and `ingle disconnect`, with the stored default model and without a server."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.cli import ingle
from app.commands.connect import NotSetUp
from app.connect.documents import InvalidFile
from app.connect.model_choice import NoSuitableModel
from app.errors import EXIT_NOT_FOUND, NoServer


@pytest.fixture
def home(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of a user who has installed llm and Zed."""
    folder, programs = tmp_path / "home", tmp_path / "programs"
    for name in ("llm", "zed"):
        programs.mkdir(exist_ok=True)
        (programs / name).write_text(f"#!{sys.executable}\n", encoding="utf-8")
        (programs / name).chmod(0o700)
    folder.mkdir()
    for name in ("CLAUDE_CONFIG_DIR", "LLM_USER_PATH", "INGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    variables = {
        "HOME": folder, "USERPROFILE": folder, "XDG_CONFIG_HOME": folder / ".config", "PATH": programs,
        "INGLE_STATE_DIR": tmp_path / "state", "INGLE_MODELS_DIR": smollm2.parent, "HF_HUB_CACHE": tmp_path / "hub",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(ingle, arguments)


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_client_is_set_up_listed_and_restored(home: Path) -> None:
    written = run("connect", "zed", "--model", "smollm2:135m")
    assert written.exit_code == 0, written.output
    settings = json.loads((home / ".config" / "zed" / "settings.json").read_text(encoding="utf-8"))
    assert settings["language_models"]["llama.cpp"]["api_url"] == "http://127.0.0.1:4645"
    assert settings["agent"]["default_model"]["model"] == "smollm2:135m"
    assert "the chat template of smollm2:135m has no tools, which Zed needs" in written.stderr
    assert "ingle serve --model smollm2:135m --context 8192" in written.stderr
    listed = json.loads(run("connect", "--json").stdout)
    assert {row["name"]: row["state"] for row in listed} == {"zed": "set up", "llm": "not set up"}
    assert "set up" in run("connect").stdout
    assert run("disconnect", "zed").exit_code == 0
    assert files_of(home) == []
    again = CliRunner().invoke(ingle, ["disconnect", "zed"], standalone_mode=False)
    assert again.return_value == EXIT_NOT_FOUND


def test_print_writes_nothing(home: Path, tmp_path: Path) -> None:
    printed = run("connect", "llm", "--print")
    assert printed.exit_code == 0, printed.output
    assert "extra-openai-models.yaml" in printed.stdout
    assert '"api_base": "http://127.0.0.1:4645/v1"' in printed.stdout
    assert files_of(home) == []
    assert not (tmp_path / "state" / "connect").exists()


def test_project_file_is_written_to_the_current_folder(home: Path, tmp_path: Path) -> None:
    written = run("connect", "claude", "--project", "--model", "smollm2:135m")
    assert written.exit_code == 0, written.output
    assert json.loads((tmp_path / ".claude" / "settings.local.json").read_text())["env"]["ANTHROPIC_MODEL"]
    assert files_of(home) == []
    refused = run("connect", "zed", "--project")
    assert refused.exit_code == 2
    assert "no settings file for a folder" in refused.output


def test_model_without_tools_is_not_chosen(home: Path) -> None:
    assert isinstance(run("connect", "zed").exception, NoSuitableModel)
    assert files_of(home) == []


@pytest.mark.parametrize(("client", "words"), [("copilot", "export COPILOT_MODEL="), ("cursor", "Cursor Settings")])
def test_clients_without_files_get_instructions(home: Path, client: str, words: str) -> None:
    printed = run("connect", client, "--model", "smollm2:135m")
    assert words in printed.stdout
    assert files_of(home) == []


def test_value_that_has_changed_since_is_reported(home: Path) -> None:
    run("connect", "zed", "--model", "smollm2:135m")
    path = home / ".config" / "zed" / "settings.json"
    path.write_text(path.read_text(encoding="utf-8").replace("4645", "8080"), encoding="utf-8")
    assert "set up, changed since" in run("connect").stdout
    undone = run("disconnect", "zed")
    assert "Left language_models.llama.cpp.api_url: it has changed since." in undone.stderr
    assert json.loads(path.read_text()) == {"language_models": {"llama.cpp": {"api_url": "http://127.0.0.1:8080"}}}


def test_invalid_file_is_refused_with_the_position(home: Path) -> None:
    path = home / ".config" / "zed" / "settings.json"
    path.parent.mkdir(parents=True)
    path.write_text('{\n  "theme" "dark"\n}')
    refused = run("connect", "zed", "--model", "smollm2:135m")
    assert isinstance(refused.exception, InvalidFile)
    assert "line 2, column 11" in refused.exception.message


def test_model_of_a_path_is_named_as_the_server_names_it(home: Path, smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "my models" / "small.gguf"
    path.parent.mkdir()
    path.symlink_to(smollm2)
    written = run("connect", "zed", "--model", "my models/small.gguf")
    assert written.exit_code == 0, written.output
    settings = json.loads((home / ".config" / "zed" / "settings.json").read_text(encoding="utf-8"))
    assert settings["agent"]["default_model"]["model"] == "small"
    assert f"ingle serve --model '{path}' --context 8192" in written.stderr


def test_check_needs_the_settings_and_a_server(home: Path) -> None:
    refused = run("connect", "llm", "--check").exception
    assert isinstance(refused, NotSetUp)
    assert refused.remedy == "ingle connect llm"
    set_up = run("connect", "llm")
    assert "Run it with: llm -m ingle/smollm2:135m" in set_up.stdout
    refused = run("connect", "llm", "--check").exception
    assert isinstance(refused, NoServer)
    assert refused.remedy == "ingle serve --model smollm2:135m --context 8192"
