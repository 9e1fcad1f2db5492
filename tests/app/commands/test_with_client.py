"""`ingle with`: a stand-in client gets the address of a server, which starts if none runs."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.process.instance import Instance, running_instances, stop_instance
from app.settings.settings import load_settings
from tests.app.commands.test_run_background import ingle
from tests.app.connect import stand_in

# llm gets the URL with the path /v1 after "openai endpoint", and the model after -m
CODE = """
import os, sys
from tests.app.connect.stand_in import main
if "fail" in sys.argv: sys.exit(7)
url, model = sys.argv[3].removesuffix("/v1"), sys.argv[5]
print(url, model, os.environ["NO_PROXY"])
sys.exit(main(url, model, "none", sys.argv[-1]))
"""


@pytest.fixture
def environment(smollm2: Path, cpu_kernels: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment with the stored default model and the client. Servers that still run at the end are stopped."""
    programs, scratch = tmp_path / "programs", tmp_path / "scratch"
    programs.mkdir()
    scratch.mkdir()
    for name in ("llm", "pi"):
        (programs / name).write_text(f"#!{sys.executable}\n{CODE}", encoding="utf-8")
        (programs / name).chmod(0o700)
    own = {"INGLE_MODELS_DIR": str(smollm2.parent), "INGLE_OFFLINE": "1", "XDG_CONFIG_HOME": str(tmp_path)}
    own |= {"INGLE_STATE_DIR": str(tmp_path / "state"), "INGLE_KV_DISK_GB": "0", "HF_HUB_CACHE": str(tmp_path / "hub")}
    own |= {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(scratch), "HOME": str(tmp_path / "home")}
    own |= {"MOST": "4", "PYTHONPATH": str(Path(stand_in.__file__).parents[3])}
    yield {**os.environ, **own}
    for instance in servers(tmp_path):
        stop_instance(instance, load_settings(state_dir=tmp_path / "state"))


def servers(tmp_path: Path) -> list[Instance]:
    return running_instances(load_settings(state_dir=tmp_path / "state"))


def test_client_uses_a_server_that_starts_and_stays(environment: dict[str, str], tmp_path: Path) -> None:
    first = ingle(environment, "with", "llm", "--context", "2048", "--", "Say hello.")
    assert first.returncode == 0, first.stderr
    [server] = servers(tmp_path)
    assert first.stdout.splitlines()[0].startswith(f"{server.url} smollm2:135m 127.0.0.1")
    assert server.context_length == 2048
    assert ingle(environment, "with", "llm", "--", "fail").returncode == 7
    checked = ingle(environment, "with", "llm", "--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert [line.split()[:2] for line in checked.stdout.splitlines()] == [
        ["ok", "reply"], ["ok", "server"], ["ok", "context"], ["ok", "cache"], ["skip", "tools"],
    ]  # fmt: skip
    refused = ingle(environment, "with", "pi", "--", "hi")
    assert refused.returncode == 3
    assert "no tools" in refused.stderr
    too_short = ingle(environment, "with", "pi", "--model", "smollm2:135m", "--", "hi")
    assert too_short.returncode == 1
    assert f"ingle stop {server.port}" in too_short.stderr
    assert servers(tmp_path) == [server]
    assert list((tmp_path / "scratch").iterdir()) == []
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nano"], 1, "claude"),
        (["zed"], 1, "ingle connect zed"),
        (["goose"], 1, "not installed"),
        (["pi"], 3, "ingle pull"),
        (["llm", "--model", "smolm2"], 3, "smollm2"),
    ],
)
def test_refusals_start_no_server(
    environment: dict[str, str], tmp_path: Path, arguments: list[str], status: int, words: str
) -> None:
    refused = ingle(environment, "with", *arguments)
    assert refused.returncode == status, refused.stderr
    assert words in refused.stderr
    assert servers(tmp_path) == []
