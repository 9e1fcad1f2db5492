"""`ingle config`: its output, and its edits of config.toml."""

import json
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.cli import ingle
from app.errors import InvalidSetting, exit_status
from app.settings.settings import SETTINGS, config_file, load_settings

WRITTEN = """# What I use.
model = "smollm2:135m"  # small

# For work
threads = 2
host_names = ["mybox.lan"]

[model_aliases]
"gpt-4o" = "smollm2:135m"  # what the editor asks for
"""

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    for name, setting in SETTINGS.items():
        for variable in (f"INGLE_{name.upper()}", *setting.also):
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run(*words: str, stdin: str = "", **variables: str) -> Result:
        return CliRunner().invoke(ingle, ["config", *words], input=stdin, env=variables)

    return run


def write(text: str) -> Path:
    config_file().parent.mkdir(parents=True, exist_ok=True)
    config_file().write_text(text, encoding="utf-8")
    return config_file()


def test_set_and_unset_keep_the_rest_of_the_file(invoke: Invoke) -> None:
    path = write(WRITTEN)
    assert invoke("set", "threads", "7").exit_code == 0
    assert path.read_text() == WRITTEN.replace("threads = 2", "threads = 7")
    assert invoke("unset", "threads").exit_code == 0
    assert path.read_text() == WRITTEN.replace("threads = 2\n", "")
    assert load_settings().threads == 0
    assert invoke("set", "context", "512").exit_code == 0  # the value must be written before the table
    assert (load_settings().context, dict(load_settings().model_aliases)) == (512, {"gpt-4o": "smollm2:135m"})


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("threads", "4", "threads = 4"),
        ("offline", "yes", "offline = true"),
        ("kv_disk_gb", "0.5", "kv_disk_gb = 0.5"),
        ("kv_disk_gb", "auto", 'kv_disk_gb = "auto"'),
        ("gpu_memory", "80%", 'gpu_memory = "80%"'),
        ("host_names", "a.lan,b.lan", 'host_names = ["a.lan", "b.lan"]'),
        ("models_dir", "~/models", 'models_dir = "~/models"'),
        ("model", 'a "b"', "model = 'a \"b\"'"),
    ],
)
def test_values_are_written_as_plain_toml(invoke: Invoke, name: str, value: str, line: str) -> None:
    expected = SETTINGS[name].parse(value)
    assert invoke("set", name, value).exit_code == 0
    written = config_file().read_text().strip()
    assert written == line or written == line.replace("'a \"b\"'", '"a \\"b\\""')
    assert vars(load_settings())[name] == expected
    assert stat.S_IMODE(config_file().stat().st_mode) == 0o600  # the file may contain API keys later


def test_model_aliases_are_written_as_a_table(invoke: Invoke) -> None:
    write(WRITTEN)
    assert invoke("set", "model_aliases", "gpt-4o=qwen3:4b,o3=*").exit_code == 0
    assert load_settings().model_aliases == {"gpt-4o": "qwen3:4b", "o3": "*"}
    assert load_settings().threads == 2


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (("set", "threads", "many"), "must be a whole number from 0 to 1024"),
        (("set", "kernels", "fast"), "must be one of auto, cuda, cpu, reference"),
        (("set", "thread", "1"), "no such setting: thread"),
        (("get", "thread"), "no such setting: thread"),
        (("unset", "thread"), "no such setting: thread"),
    ],
)
def test_invalid_value_is_refused_and_the_file_is_unchanged(
    invoke: Invoke, words: tuple[str, ...], allowed: str
) -> None:
    path = write(WRITTEN)
    problem = invoke(*words).exception
    assert isinstance(problem, InvalidSetting)
    assert allowed in problem.message
    assert problem.remedy
    assert exit_status(problem) == 2
    assert path.read_text() == WRITTEN


def test_unknown_key_can_be_removed(invoke: Invoke) -> None:
    path = write("modell = 1\nthreads = 2\n")
    assert isinstance(invoke("list").exception, InvalidSetting)
    assert invoke("unset", "modell").exit_code == 0
    assert path.read_text() == "threads = 2\n"
    assert "is not set in" in invoke("unset", "context").stderr


def test_invalid_toml_file_is_unchanged(invoke: Invoke) -> None:
    path = write("model = ")
    assert isinstance(invoke("set", "threads", "1").exception, InvalidSetting)
    assert path.read_text() == "model = "


def test_target_of_a_symbolic_link_is_written(invoke: Invoke, tmp_path: Path) -> None:
    target = tmp_path / "dotfiles.toml"
    target.write_text("threads = 2\n")
    target.chmod(0o644)
    config_file().parent.mkdir(parents=True)
    config_file().symlink_to(target)
    assert invoke("set", "context", "512").exit_code == 0
    assert config_file().is_symlink()
    assert target.read_text() == "threads = 2\ncontext = 512\n"
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_set_warns_about_an_overriding_variable(invoke: Invoke) -> None:
    answer = invoke("set", "threads", "3", INGLE_THREADS="5")
    assert "INGLE_THREADS is set in the environment and overrides config.toml" in answer.stderr
    assert invoke("get", "threads", INGLE_THREADS="5").stdout == "5\n"
    assert invoke("get", "threads").stdout == "3\n"


def test_list_shows_every_setting_but_no_secrets(invoke: Invoke) -> None:
    keys: Mapping[str, str] = {"INGLE_API_KEY": "sk-secret", "HF_TOKEN": "hf_secret"}
    shown = invoke("list", **keys)
    lines = dict(line.split(None, 1) for line in shown.stdout.splitlines()[1:])
    assert lines.keys() == SETTINGS.keys()
    assert lines["api_key"].split() == ["(secret)", "INGLE_API_KEY"]
    assert lines["kv_disk_gb"].split() == ["auto", "default"]
    assert lines["offline"].split() == ["no", "default"]
    for words in (("list",), ("list", "--json"), ("get", "api_key"), ("get", "hub_token", "--json")):
        assert "secret" not in invoke(*words, **keys).stdout.replace("(secret)", "")


def test_list_prints_json_on_request(invoke: Invoke) -> None:
    write(WRITTEN)
    found = {entry["name"]: entry for entry in json.loads(invoke("list", "--json", INGLE_GPU_MEMORY="20GB").stdout)}
    assert found.keys() == SETTINGS.keys()
    assert (found["threads"]["value"], found["threads"]["origin"]) == (2, str(config_file()))
    assert found["gpu_memory"]["value"] == "20GB"
    assert found["host_names"]["value"] == ["mybox.lan"]
    assert found["model_aliases"]["value"] == {"gpt-4o": "smollm2:135m"}
    assert found["port"] == json.loads(invoke("get", "port", "--json").stdout)
    assert found["port"]["variable"] == "INGLE_PORT"


def test_set_reads_a_value_from_stdin(invoke: Invoke) -> None:
    assert invoke("set", "hub_token", "-", stdin="hf_secret\n").exit_code == 0
    assert load_settings().hub_token == "hf_secret"  # noqa: S105


def test_path_of_a_missing_file_is_printed(invoke: Invoke) -> None:
    assert invoke("path").stdout == f"{config_file()}\n"
    assert not config_file().exists()


def test_former_name_is_written_under_the_current_name(invoke: Invoke) -> None:
    path = write("activation_planes = 1\n")
    assert invoke("get", "activation_planes").output.strip() == "8"
    assert invoke("set", "activation_planes", "2").exit_code == 0
    assert path.read_text() == "activation_bits = 14\n"
    write("activation_planes = 1\n")
    assert invoke("unset", "activation_planes").exit_code == 0
    assert path.read_text() == ""


def test_unset_removes_the_former_name(invoke: Invoke) -> None:
    path = write("activation_planes = 1\n")
    assert invoke("unset", "activation_bits").exit_code == 0
    assert path.read_text() == ""
