"""What being shown costs a reply: `python -m tests.tui.decoding MODEL.gguf`, on a machine that does nothing else.

One server writes the same kind of reply in turn to a client that throws it away and to the chat in a terminal, which
both share the machine with it. Printed: tokens a second behind the first one, as the server counts them for each, and
the median of their ratios.
"""

import argparse
import json
import os
import select
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from app.history.history import History
from app.history.records import Usage
from tests.app.test_serve import ready, serve
from tests.terminal_screen import Terminal, python

QUESTION = "Tell me a long story about a fireplace, an old house, a storm and a cat that likes all of them."
CONTEXT = "1024"  # tokens, at whose end a reply ends at the latest
FEWEST = 100  # tokens of a reply that counts
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
LONG = 600.0  # seconds
REST = 5.0  # in which a chat gets its title
NEW, QUIT = b"\x0e", b"\x11"


@contextmanager
def serving(model: Path, environment: dict[str, str]) -> Iterator[str]:
    """The URL of a server."""
    own = {**os.environ, **environment}
    with serve(own, "--context", CONTEXT, "--model", str(model)) as server:
        try:
            yield ready(server, own).url
        finally:
            server.terminate()


def headless(url: str, model: Path) -> float:
    """Tokens a second of a reply that nobody reads."""
    body = {
        "model": str(model),
        "messages": [{"role": "user", "content": QUESTION}],
        **STREAM,
    }
    timings: dict[str, float] = {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LONG, trust_env=False) as reply:
        assert reply.is_success, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                timings = json.loads(line[6:]).get("timings", timings)
    return timings["predicted_per_second"] if timings["predicted_n"] >= FEWEST else headless(url, model)


class ShownChat:
    """The chat in a terminal, and the file that it keeps its replies in."""

    def __init__(self, model: Path, environment: dict[str, str]) -> None:
        self._terminal = Terminal(python("-m", "app", "chat", "--model", str(model)), environment)
        self._terminal.resize(120, 40)
        self._terminal.read_until(lambda output: b", free " in output)
        self._history = History(Path(environment["INGLE_STATE_DIR"], "history"))

    def tokens_a_second(self) -> float:
        known = len(self._replies())
        os.write(self._terminal.master, NEW)
        os.write(self._terminal.master, QUESTION.encode() + b"\r")
        while len(self._replies()) == known:
            self._look_on(1.0)
        last = self._replies()[-1]
        self._look_on(REST)
        enough = last.reply_tokens >= FEWEST
        return (last.reply_tokens - 1) / last.reply_seconds if enough else self.tokens_a_second()

    def _look_on(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._terminal.master], [], [], left)[0]:
                os.read(self._terminal.master, 1 << 20)

    def _replies(self) -> list[Usage]:
        chats = sorted(chat.id for chat in self._history.chats.listed())
        found = [one.usage for chat in chats for one in self._history.messages.of(chat)]
        return [usage for usage in found if usage is not None and usage.reply_tokens]

    def close(self) -> None:
        self._history.close()
        os.write(self._terminal.master, QUIT)
        self._terminal.ended()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    model = given.model.absolute()
    with tempfile.TemporaryDirectory(prefix="ingle-decoding-") as place:
        environment = {"INGLE_STATE_DIR": place}
        with serving(model, environment) as url:
            chat = ShownChat(model, environment)
            ratios = []
            for _ in range(given.rounds):
                alone, shown = headless(url, model), chat.tokens_a_second()
                ratios.append(shown / alone)
                print(f"headless {alone:6.1f}   in the chat {shown:6.1f}   ratio {ratios[-1]:.3f}", flush=True)
            chat.close()
    print(f"median of {given.rounds}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
