"""The command line: its output, exit statuses, and imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from app import cli
from app.cli import COMMANDS, ingle
from app.errors import AppError, InvalidSetting, ModelNotFound, NoSpace, Offline
from tests.support.processes import Started

DEFAULT = "expandable_segments:True"
HEAVY = {"torch", "numpy", "huggingface_hub", "tokenizers", "jinja2", "httpx", "rich", "platformdirs"}


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("INGLE_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("INGLE_HUB_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for variable in ("INGLE_MODEL", "INGLE_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)


def _ingle(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line in a new process."""
    return subprocess.run([sys.executable, "-m", "app", *arguments], capture_output=True, text=True, check=False)


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(ingle, arguments, catch_exceptions=False)


@pytest.fixture
def stored(tmp_path: Path, smollm2: Path) -> Path:
    """The path of the default model in a temporary models folder."""
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / smollm2.name
    path.hardlink_to(smollm2)
    return path


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help_lists_every_command_and_examples(arguments: list[str]) -> None:
    output = _invoke(*arguments).output
    assert all(f"  {name} " in output for name in COMMANDS)
    assert "ingle pull smollm2:135m" in output


@pytest.mark.parametrize("arguments", [["--endpoint"], ["chat", "--endpoint"], ["What is this?", "--endpoint"]])
def test_chat_is_the_default_command(arguments: list[str]) -> None:
    answer = _invoke(*arguments)
    assert (answer.exit_code, "'--endpoint' requires an argument" in answer.output) == (2, True)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"run"}))
def test_every_command_has_help_with_examples(name: str) -> None:
    output = _invoke(name, "--help").output
    assert "Examples:" in output
    assert f"ingle {name}" in output


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, DEFAULT), ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64"), ("PYTORCH_CUDA_ALLOC_CONF", None)],
)
def test_torch_allocates_expandable_segments_by_default(
    given: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "max_split_size_mb:64")
        if name != given:
            monkeypatch.delenv(name)
    COMMANDS["ps"].load()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == found


@pytest.mark.parametrize("code", ["import app.cli", "import sys, app.cli; sys.argv[1:] = ['--help']; app.cli.main()"])
def test_start_imports_no_heavy_modules(code: str) -> None:
    code += f"\nimport sys; print('loaded:', sorted({HEAVY} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).endswith("loaded: []\n")


def test_unknown_command_suggests_a_similar_one() -> None:
    answer = _ingle("pul")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == "error: no such command: pul. Did you mean pull?\ntry: ingle --help\n"


def test_unknown_option_is_a_usage_error() -> None:
    assert _ingle("--wrong").returncode == 2
    wrong = _ingle("ls", "--wrong")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "error: no such option '--wrong'. Did you mean '--json'?\ntry: ingle ls --help\n",
    )
    missing = _ingle("rm")
    assert (missing.returncode, missing.stderr) == (2, "error: missing argument 'NAME...'\ntry: ingle rm --help\n")


def test_version_is_printed() -> None:
    assert _invoke("--version").output.startswith("ingle ")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AppError("m", "r"), 1),
        (InvalidSetting("m", "r"), 2),
        (ModelNotFound("m", "r"), 3),
        (NoSpace("m", "r"), 4),
        (Offline("m", "r"), 5),
        (KeyboardInterrupt(), 130),
        (PermissionError(13, "Permission denied", "/x"), 1),
        (OSError(28, "No space left on device", "/x"), 4),
        (MemoryError(), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_status(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: BaseException, status: int
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli.CommandEntry, "load", lambda self: click.Command("ls", callback=fail))
    monkeypatch.setattr(sys, "argv", ["ingle", "ls"])
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    assert cli.main() == status
    output = capfd.readouterr()
    assert output.out == ""
    if isinstance(error, AppError):
        assert output.err == "error: m\ntry: r\n"
    if isinstance(error, PermissionError):
        assert output.err == "error: /x: Permission denied\n"


SHORTAGES = [
    MemoryError(),
    OSError(12, "Cannot allocate memory"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    RuntimeError("can't start new thread"),
    SystemError("error return without exception set"),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=repr)
@pytest.mark.parametrize("is_cause", [False, True])
def test_shortage_of_memory_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, is_cause: bool
) -> None:
    def fail() -> None:
        if is_cause:
            raise OSError("Could not find libllvmlite.so") from error
        raise error

    monkeypatch.setattr(cli.CommandEntry, "load", lambda self: click.Command("ls", callback=fail))
    monkeypatch.setattr(sys, "argv", ["ingle", "ls"])
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    assert cli.main() == 1
    assert capsys.readouterr().err.startswith("error: There is not enough memory\ntry: Close other programs")


def test_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(cli.CommandEntry, "load", lambda self: click.Command("ls", callback=fail))
    monkeypatch.setattr(sys, "argv", ["ingle", "ls"])
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    with pytest.raises(RuntimeError, match="a mistake"):
        cli.main()


def test_closed_stdout_prints_no_error(stored: Path) -> None:
    command = [sys.executable, "-m", "app", "ls", "--json"]
    with Started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_invalid_setting_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_THREADS", "many")
    answer = _ingle("ls")
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: INGLE_THREADS: threads must be")


def test_ls_without_models_suggests_pull(tmp_path: Path) -> None:
    answer = _ingle("ls")
    assert (answer.returncode, answer.stdout) == (0, "")
    assert "ingle pull smollm2:135m" in answer.stderr
    assert json.loads(_ingle("ls", "--json").stdout) == []
    assert not (tmp_path / "models").exists()


def test_pulled_model_is_listed_and_removed(stored: Path) -> None:
    pulled = _ingle("pull")
    assert (pulled.returncode, pulled.stdout) == (0, f"{stored}\n")
    assert "smollm2:135m is ready: 98.4 MB" in pulled.stderr
    quiet = _ingle("pull", "-q", "smollm2", "--json")
    assert quiet.stderr == ""
    assert json.loads(quiet.stdout)["path"] == str(stored)

    table = _invoke("ls").output.splitlines()
    assert table[0].split() == ["NAME", "SIZE", "QUANT", "STORED", "USED", "PATH"]
    assert table[1].startswith("smollm2:135m  98.4 MB  Q4_1   20")
    assert table[1].endswith(str(stored))
    [listed] = json.loads(_invoke("ls", "--json").output)
    assert listed.keys() == {"name", "path", "size", "sha256", "source", "quantization", "stored_at", "used_at"}
    assert (listed["name"], listed["size"]) == ("smollm2:135m", 98362432)

    spared = _invoke("rm", "--dry-run", "smollm2:135m")
    assert (spared.exit_code, spared.stdout) == (0, "")
    assert spared.stderr == f"Would remove {stored}: 98.4 MB would be freed.\n"
    assert stored.exists()
    removed = _ingle("rm", "smollm2:135m")
    assert (removed.returncode, removed.stdout) == (0, "")
    assert "98.4 MB freed" in removed.stderr
    assert not stored.exists()
    assert _ingle("rm", "smollm2:135m").returncode == 3


def test_pull_of_an_unknown_name_is_not_found() -> None:
    answer = _ingle("pull", "no-such-model")
    assert (answer.returncode, answer.stdout) == (3, "")
    assert "smollm2:135m" in answer.stderr


def test_pull_in_offline_mode_exits_with_status_5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_OFFLINE", "1")
    answer = _ingle("pull")
    assert (answer.returncode, answer.stdout) == (5, "")
    assert "INGLE_OFFLINE" in answer.stderr
