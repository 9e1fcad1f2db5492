"""`ingle completion`: the scripts, and the completions that a shell receives."""

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from app.cli import COMMANDS, ingle
from app.settings.settings import SETTINGS


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_calls_this_program(shell: str) -> None:
    script = CliRunner().invoke(ingle, ["completion", shell]).stdout
    assert f"_INGLE_COMPLETE={shell}_complete" in script
    if interpreter := shutil.which(shell):
        command = [interpreter, "-n"] if shell != "fish" else [interpreter, "--no-execute"]
        assert subprocess.run(command, input=script.encode(), check=False).returncode == 0


def test_unknown_shell_is_a_usage_error() -> None:
    assert CliRunner().invoke(ingle, ["completion", "tcsh"]).exit_code == 2


def completed(words: str) -> list[str]:
    """Return the completions that bash receives for the last word of a line."""
    environment = {
        "_INGLE_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    answer = CliRunner().invoke(ingle, [], prog_name="ingle", complete_var="_INGLE_COMPLETE", env=environment)
    return [line.partition(",")[2] for line in answer.stdout.splitlines() if line]


def test_model_names_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MODELS_DIR", "HUB_CACHE", "OLLAMA_DIR", "LMSTUDIO_DIR"):
        monkeypatch.setenv(f"INGLE_{name}", str(tmp_path / name))
    assert completed("ingle pull smollm2:1") == ["smollm2:135m", "smollm2:1.7b"]
    assert completed("ingle rm smollm2:1") == []  # no name is completed, because no model is stored
    assert completed("ingle fit qwen3:0") == ["qwen3:0.6b"]
    monkeypatch.setenv("INGLE_THREADS", "many")
    assert completed("ingle pull smollm2:1") == []


def test_commands_options_and_names_are_completed() -> None:
    assert completed("ingle ") == list(COMMANDS)
    assert completed("ingle pu") == ["pull"]
    assert "--json" in completed("ingle ls --")
    assert completed("ingle config set kv_") == [name for name in SETTINGS if name.startswith("kv_")]
