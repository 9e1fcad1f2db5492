"""Settings of each client: where they are, what they name, and that no key is readable by others."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from app.connect.clients import CLIENTS, find_client
from app.connect.connection import Client, Connection, Setup
from app.connect.undo import Undo
from app.settings.places import Places, places_of

KEY = "key-of-the-user"
CONNECTION = Connection("http://127.0.0.1:4645", "org/model:Q4_K_M", 40_960, has_tools=True)
WITH_FILES = [client for client in CLIENTS if client.setup is not None]

every_client = pytest.mark.parametrize("client", WITH_FILES, ids=lambda client: client.name)
with_and_without_key = pytest.mark.parametrize("key", [None, KEY])


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return places_of({"HOME": str(tmp_path / "home")}, tmp_path / "state" / "own-key", system="linux")


@pytest.fixture
def undo(tmp_path: Path) -> Undo:
    return Undo(tmp_path / "state" / "connect")


def setup_of(client: Client, places: Places, key: str | None = None) -> Setup:
    assert client.setup is not None
    return client.setup(replace(CONNECTION, key=key), places)


def test_every_client_has_files_steps_or_variables() -> None:
    assert {client.name for client in CLIENTS if client.setup is None and client.steps is None} == {"copilot"}


@every_client
def test_settings_name_the_server_and_the_model(client: Client, places: Places) -> None:
    setup = setup_of(client, places)
    written = json.dumps([[str(path), value] for target in setup.targets for path, value in target.values.items()])
    assert "127.0.0.1:4645" in written
    assert "org/model:Q4_K_M" in written


@every_client
@with_and_without_key
def test_settings_are_removed_again_with_their_files(
    client: Client, places: Places, undo: Undo, tmp_path: Path, key: str | None
) -> None:
    setup = setup_of(client, places, key)
    undo.connect(client.name, setup.targets)
    created = {path for path in (tmp_path / "home").rglob("*") if path.is_file()}
    assert created == {target.path for target in setup.targets}
    assert undo.is_set_up(client.name)
    undo.disconnect(client.name)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@every_client
def test_key_is_in_no_file_that_others_can_read(client: Client, places: Places, undo: Undo, tmp_path: Path) -> None:
    setup = setup_of(client, places, KEY)
    undo.connect(client.name, setup.targets)
    readable = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert readable == []
    holding = {target.path for target in setup.targets if KEY in target.path.read_text(encoding="utf-8")}
    assert holding == {target.path for target in setup.targets if target.is_private}
    assert not any(KEY in note for note in setup.notes)


def test_only_cline_has_no_other_means_than_the_key_itself(places: Places) -> None:
    private = [
        client.name for client in WITH_FILES if any(one.is_private for one in setup_of(client, places, KEY).targets)
    ]
    assert private == ["cline"]


@pytest.mark.parametrize("client", [one for one in CLIENTS if one.has_project_file], ids=lambda client: client.name)
def test_project_files_are_in_the_folder(client: Client, places: Places, tmp_path: Path) -> None:
    setup = setup_of(client, replace(places, project=tmp_path / "project"))
    assert all(target.path.is_relative_to(tmp_path / "project") for target in setup.targets)


@pytest.mark.parametrize(
    ("system", "environment", "client", "expected"),
    [
        ("linux", {}, "claude", "/home/me/.claude/settings.json"),
        ("linux", {"CLAUDE_CONFIG_DIR": "/c"}, "claude", "/c/settings.json"),
        ("linux", {"CODEX_HOME": "/x"}, "codex", "/x/ingle.config.toml"),
        ("linux", {"XDG_CONFIG_HOME": "/conf"}, "opencode", "/conf/opencode/opencode.json"),
        ("linux", {}, "vscode", "/home/me/.config/Code/User/chatLanguageModels.json"),
        ("darwin", {}, "vscode", "/home/me/Library/Application Support/Code/User/chatLanguageModels.json"),
        ("darwin", {}, "zed", "/home/me/.config/zed/settings.json"),
        ("darwin", {}, "llm", "/home/me/Library/Application Support/io.datasette.llm/extra-openai-models.yaml"),
        ("linux", {"LLM_USER_PATH": "/llm"}, "llm", "/llm/extra-openai-models.yaml"),
        ("win32", {"APPDATA": "/roaming"}, "vscode", "/roaming/Code/User/chatLanguageModels.json"),
        ("win32", {"APPDATA": "/roaming"}, "zed", "/roaming/Zed/settings.json"),
        ("win32", {"APPDATA": "/roaming"}, "goose", "/roaming/Block/goose/config/config.yaml"),
        ("linux", {"PI_CODING_AGENT_DIR": "/pi"}, "pi", "/pi/models.json"),
    ],
)
def test_files_follow_the_system_and_its_variables(
    system: str, environment: dict[str, str], client: str, expected: str
) -> None:
    home = {"USERPROFILE" if system == "win32" else "HOME": "/home/me"}
    places = places_of({**home, **environment}, Path("/state/own-key"), system=system)
    assert setup_of(find_client(client), places).targets[0].path == Path(expected)


def test_existing_file_with_comments_is_preferred(places: Places) -> None:
    folder = places.config / "opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.jsonc").write_text("{}")
    assert setup_of(find_client("opencode"), places).targets[0].path.name == "opencode.jsonc"


def test_every_installed_edition_of_vs_code_is_set_up(places: Places) -> None:
    for name in ("Code - Insiders", "VSCodium"):
        (places.programs / name / "User").mkdir(parents=True)
    editions = [target.path.parts[-3] for target in setup_of(find_client("vscode"), places).targets]
    assert editions == ["Code - Insiders", "VSCodium"]


def test_profile_of_codex_is_toml_and_names_its_catalog(places: Places, undo: Undo) -> None:
    undo.connect("codex", setup_of(find_client("codex"), places, KEY).targets)
    profile = tomllib.loads((places.codex / "ingle.config.toml").read_text(encoding="utf-8"))
    catalog = json.loads(Path(profile["model_catalog_json"]).read_text(encoding="utf-8"))
    assert profile["model_provider"] == "ingle"
    assert profile["model_providers"]["ingle"]["auth"] == {"command": "cat", "args": [str(places.key_file)]}
    assert catalog["models"][0]["context_window"] == 40_960


def test_model_of_continue_is_added_to_the_existing_ones(places: Places, undo: Undo) -> None:
    path = places.home / ".continue" / "config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("name: Mine\nmodels:\n  - name: Other\n    provider: ollama\n")
    undo.connect("continue", setup_of(find_client("continue"), places).targets)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert content["name"] == "Mine"
    assert [model["name"] for model in content["models"]] == ["Inglenook", "Other"]
    assert content["models"][0]["defaultCompletionOptions"]["contextLength"] == 40_960
