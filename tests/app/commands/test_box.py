"""`ingle share`, `ingle box`, and the commands that use models of another machine."""

import json
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy
from app.server.http.access import Authenticator
from app.settings.api_keys import shared_key
from app.settings.boxes import Box
from app.settings.settings import load_settings
from app.text.tokenizer import Tokenizer
from tests.app.command_line import ingle
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.shared_machine import SharedMachine, environment, share


@dataclass
class Laptop:
    """A machine without models, and a shared machine with a running server."""

    folder: Path
    shared: SharedMachine
    server: LiveServer

    @property
    def line(self) -> str:
        return self.shared.box(self.server.port).line

    def run(self, *words: str, stdin: str = "") -> "CompletedProcess[bytes]":
        folders = {name: str(self.folder / name) for name in ("models", "hub", "ollama", "lmstudio")}
        own = {"INGLE_MODELS_DIR": folders["models"], "HF_HUB_CACHE": folders["hub"], "INGLE_OFFLINE": "1"}
        own |= {"INGLE_OLLAMA_DIR": folders["ollama"], "INGLE_LMSTUDIO_DIR": folders["lmstudio"]}
        return ingle({**environment(self.folder), **own}, *words, stdin=stdin.encode())


@pytest.fixture
def laptop(tmp_path: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[Laptop]:
    shared = share(tmp_path / "box")
    engine, _ = controlled_engine(tokenizer.vocab_size)
    settings = load_settings(state_dir=tmp_path / "box" / "state")
    policy = AccessPolicy(Authenticator(["another-key-of-the-box"], shared_key=lambda: shared_key(settings)))
    server = LiveServer("big", engine, tokenizer, renderer, policy=policy)
    server.use_tls(shared.certificate, shared.private_key)
    with server:
        yield Laptop(tmp_path / "laptop", shared, server)
    engine.assert_empty()


def test_share_prints_the_same_line_until_it_is_off(tmp_path: Path) -> None:
    first = share(tmp_path)
    assert share(tmp_path).line == first.line
    for file in (tmp_path / "state" / "share").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    config = tmp_path / "config" / "inglenook" / "config.toml"
    assert "tls_port = 9" in config.read_text(encoding="utf-8")
    off = ingle(environment(tmp_path), "share", "--off")
    assert (off.returncode, off.stderr) == (0, b"The key is revoked.\n")
    assert "tls_port" not in config.read_text(encoding="utf-8")
    second = Box.parse("gpu", share(tmp_path).line)
    assert second.key != Box.parse("gpu", first.line).key
    assert second.fingerprint == Box.parse("gpu", first.line).fingerprint


@pytest.mark.parametrize("address", ["192.168.1.5", "gpu-box.lan", "fe80::1"])
def test_line_is_read_as_it_was_printed(tmp_path: Path, address: str) -> None:
    done = ingle(environment(tmp_path), "share", "--address", address)
    line = done.stdout.decode().strip()
    box = Box.parse("gpu", line)
    assert box.line == line
    assert box.url == f"https://{f'[{address}]' if ':' in address else address}:4646"
    assert box.key not in repr(box)


def test_added_machine_is_listed_and_answers(laptop: Laptop) -> None:
    added = laptop.run("box", "add", "gpu", "-", stdin=f"{laptop.line}\n")
    assert (added.returncode, added.stdout) == (0, b"gpu/big\n"), added.stderr
    [file] = (laptop.folder / "state" / "boxes").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert laptop.run("box", "ls").stdout.splitlines()[1].split() == [b"gpu", laptop.server.url.encode(), b"gpu/big"]
    [listed] = json.loads(laptop.run("box", "ls", "--json").stdout)
    assert listed["models"] == ["gpu/big"]
    assert "key" not in listed
    assert laptop.run("ls").stdout.splitlines()[1].split()[0] == b"gpu/big"
    ran = laptop.run("run", "--model", "gpu/big", "Hi", "-n", "5", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["usage"]["completion_tokens"] == 5
    assert laptop.run("box", "rm", "gpu").returncode == 0
    assert laptop.run("box", "rm", "gpu").returncode != 0
    assert laptop.run("box", "ls").stdout == b""


def test_revoked_key_is_refused_by_a_running_server(laptop: Laptop) -> None:
    laptop.run("box", "add", "gpu", laptop.line)
    ingle(environment(laptop.shared.folder), "share", "--off")
    refused = laptop.run("run", "--model", "gpu/big", "Hi")
    assert refused.returncode != 0
    assert b"API key is missing or unknown" in refused.stderr
    assert b"ingle box add gpu LINE" in refused.stderr


def test_machine_with_another_certificate_is_not_added(laptop: Laptop) -> None:
    real = laptop.shared.box(laptop.server.port).fingerprint
    wrong = f"{laptop.line[:-64]}{'0' * 64}"
    refused = laptop.run("box", "add", "gpu", wrong)
    said = b" ".join(refused.stderr.split())
    assert refused.returncode != 0
    assert f"its certificate has the fingerprint {real}, and {'0' * 64} is expected".encode() in said
    assert not (laptop.folder / "state" / "boxes").exists()


def test_machine_that_is_away_is_named(laptop: Laptop) -> None:
    laptop.run("box", "add", "gpu", laptop.line)
    laptop.server.stop()
    assert b"gpu is away: the server at https://127.0.0.1" in laptop.run("ls").stderr
    ran = laptop.run("run", "--model", "gpu/big", "Hi")
    assert ran.returncode != 0
    assert b"Start the server of gpu with ingle serve." in ran.stderr


Words = Callable[[Laptop], Sequence[str]]


@pytest.mark.parametrize(
    "words",
    [
        lambda laptop: ("box", "add", "Big", laptop.line),
        lambda laptop: ("box", "add", "../x", laptop.line),
        lambda laptop: ("box", "add", "gpu", "https://gpu-box:4646"),
        lambda laptop: ("box", "add", "gpu", laptop.line[:-1]),
        lambda laptop: ("box", "add", "gpu", laptop.line.replace("https", "http")),
    ],
)
def test_invalid_line_or_name_is_refused_without_showing_the_key(laptop: Laptop, words: Words) -> None:
    refused = laptop.run(*words(laptop))
    assert refused.returncode != 0
    assert laptop.shared.box(1).key.encode() not in refused.stdout + refused.stderr
    assert not (laptop.folder / "state" / "boxes").exists()


def test_options_of_the_engine_are_refused_for_another_machine(laptop: Laptop) -> None:
    laptop.run("box", "add", "gpu", laptop.line)
    for option in (("--once",), ("--context", "512")):
        refused = laptop.run("run", "--model", "gpu/big", "Hi", *option)
        assert (refused.returncode, b"do not apply to gpu" in refused.stderr) == (2, True)
