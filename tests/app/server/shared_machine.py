"""A machine that is shared with `ingle share`, and one that uses its models: each has its own folders."""

import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy
from app.server.boxes import Boxes
from app.server.http.access import Authenticator
from app.settings.boxes import Box, keep_box
from app.text.tokenizer import Tokenizer
from tests.app.command_line import ingle
from tests.app.server.live_server import ControlledRunner, LiveServer, controlled_engine

LAPTOP_KEY = "the-key-of-the-laptop"


@dataclass(frozen=True)
class SharedMachine:
    """The certificate of a shared machine, and the line for others."""

    folder: Path
    line: str

    @property
    def certificate(self) -> Path:
        return self.folder / "state" / "share" / "certificate.pem"

    @property
    def private_key(self) -> Path:
        return self.folder / "state" / "share" / "private-key.pem"

    def box(self, port: int, name: str = "gpu") -> Box:
        """Return the entry of this machine on another one, if its server has this port."""
        box = Box.parse(name, self.line)
        return replace(box, url=f"https://127.0.0.1:{port}")


def environment(folder: Path) -> dict[str, str]:
    return {"INGLE_STATE_DIR": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config"), "COLUMNS": "200"}


def share(folder: Path) -> SharedMachine:
    done = ingle(environment(folder), "share", "--address", "127.0.0.1", "--port", "9")
    assert done.returncode == 0, done.stderr
    return SharedMachine(folder, done.stdout.decode().strip())


@dataclass
class TwoMachines:
    """A laptop whose server has its own key, and a box whose server has another one."""

    laptop: LiveServer
    box: LiveServer
    box_runner: ControlledRunner
    entry: Box
    laptop_state: Path


@contextmanager
def two_machines(folder: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[TwoMachines]:
    shared = share(folder / "box")
    (box_engine, runner), (laptop_engine, _) = (controlled_engine(tokenizer.vocab_size) for _ in range(2))
    key = Box.parse("gpu", shared.line).key
    box_policy = AccessPolicy(Authenticator(["the-key-of-the-box"], shared_key=lambda: key))
    laptop_policy = AccessPolicy(Authenticator([LAPTOP_KEY]))
    state_dir = folder / "laptop" / "state"
    box = LiveServer("big", box_engine, tokenizer, renderer, policy=box_policy)
    box.use_tls(shared.certificate, shared.private_key)
    with box:
        entry = shared.box(box.port)
        keep_box(entry, state_dir)
        boxes = Boxes(state_dir)
        with LiveServer("small", laptop_engine, tokenizer, renderer, policy=laptop_policy, boxes=boxes) as laptop:
            yield TwoMachines(laptop, box, runner, entry, state_dir)
    box_engine.assert_empty()
    laptop_engine.assert_empty()


class RawBox:
    """A box that answers each connection with the bytes of a test."""

    def __init__(self, shared: SharedMachine, answer: Callable[[ssl.SSLSocket, bytes], None]) -> None:
        """`answer` sends the reply to a request, given its head."""
        self._answer = answer
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(shared.certificate, shared.private_key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        try:
            with self._context.wrap_socket(plain, server_side=True) as connection:
                received = b""
                while not (head := re.match(rb".*?\r\n\r\n", received, re.DOTALL)):
                    received += connection.recv(65536)
                length = re.search(rb"\r\ncontent-length: (\d+)", head[0].lower())
                while len(received) < len(head[0]) + int(length[1] if length else 0):
                    received += connection.recv(65536)
                self._answer(connection, head[0])
        except OSError:  # the client has left, or refuses the certificate
            pass

    def close(self) -> None:
        self._listener.close()
