"""Measures how much the screens slow down a reply: `python -m tests.tui.decoding MODEL.gguf`, on an idle machine.

One server generates replies of the same kind in turn for a client that discards them and for the chat in a terminal.
Prints tokens per second after the first token, as the server measures them, and the median of the ratios. If the host
of a virtual machine takes CPU time in a round, the round is shown, but not counted, and is repeated.
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
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import httpx

from app.history.history import History
from app.history.records import StoredUsage
from app.models.sampling_defaults import suitable_sampling
from tests.app.commands.test_serve import ready, serve
from tests.support.terminal_screen import Terminal, python

QUESTION = "Tell me a long story about a fireplace, an old house, a storm and a cat that likes all of them."
CONTEXT = 2048  # tokens: ends every reply, and is long enough that its first second counts for little
FEWEST = 100  # minimum number of tokens in a reply that counts
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
LONG = 600.0  # time limit in seconds
REST = 5.0  # seconds for the chat to get its title
TAKEN = 0.02  # maximum share of CPU time that the host may take in a round that counts
ROUNDS_AT_MOST = 100
NEW, QUIT = b"/new\r", b"\x11"


def taken_seconds() -> float:
    """Return the CPU seconds of all cores that the host gave to other machines. Linux only."""
    figures = Path("/proc/stat").read_text(encoding="ascii").split()
    return int(figures[8]) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(model: Path, context: int, environment: dict[str, str]) -> Iterator[str]:
    """Start a server and yield its URL."""
    own = {**os.environ, **environment}
    with serve(own, "--context", str(context), "--model", str(model)) as server:
        try:
            yield ready(server, own).url
        finally:
            server.terminate()


@dataclass(frozen=True)
class Speed:
    """The speed of one reply."""

    tokens_a_second: float  # tokens per second after the first token
    taken: float  # fraction of CPU time that the host took during the reply


class Watched:
    """Measures the fraction of CPU time that the host takes while the block runs."""

    share = 0.0

    def __enter__(self) -> "Watched":
        self._began = time.monotonic(), taken_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        began, taken = self._began
        self.share = (taken_seconds() - taken) / (time.monotonic() - began) / (os.cpu_count() or 1)


def headless(url: str, model: Path) -> Speed:
    """Return the speed of a reply to a client that discards it."""
    body = {
        "model": str(model),
        "messages": [{"role": "user", "content": QUESTION}],
        **suitable_sampling(str(model), model).values,  # same sampling as in the chat
        **STREAM,
    }
    timings: dict[str, float] = {}
    ask = httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LONG, trust_env=False)
    with Watched() as host, ask as reply:
        assert reply.is_success, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                timings = json.loads(line[6:]).get("timings", timings)
    enough = timings["predicted_n"] >= FEWEST
    return Speed(timings["predicted_per_second"], host.share) if enough else headless(url, model)


class ShownChat:
    """The chat in a terminal, with the file that stores its replies."""

    def __init__(self, model: Path, environment: dict[str, str]) -> None:
        self._terminal = Terminal(python("-m", "app", "chat", "--model", str(model)), environment)
        self._terminal.resize(120, 40)
        self._terminal.read_until(lambda output: b" free" in output)
        self._history = History(Path(environment["INGLE_STATE_DIR"], "history"))

    def speed(self) -> Speed:
        known = len(self._replies())
        os.write(self._terminal.master, NEW)
        os.write(self._terminal.master, QUESTION.encode() + b"\r")
        with Watched() as host:
            while len(self._replies()) == known:
                self._look_on(0.5)
        last = self._replies()[-1]
        self._look_on(REST)
        enough = last.reply_tokens >= FEWEST
        return Speed((last.reply_tokens - 1) / last.reply_seconds, host.share) if enough else self.speed()

    def _look_on(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._terminal.master], [], [], left)[0]:
                os.read(self._terminal.master, 1 << 20)

    def _replies(self) -> list[StoredUsage]:
        chats = sorted(chat.id for chat in self._history.chats.listed())
        found = [one.usage for chat in chats for one in self._history.messages.in_chat(chat)]
        return [usage for usage in found if usage is not None and usage.reply_tokens]

    def close(self) -> None:
        self._history.close()
        os.write(self._terminal.master, QUIT)
        self._terminal.ended()


def ratios(url: str, model: Path, chat: ShownChat) -> Iterator[float]:
    """Return the ratios of all rounds that count."""
    for _ in range(ROUNDS_AT_MOST):
        alone, shown = headless(url, model), chat.speed()
        ratio, counts = shown.tokens_a_second / alone.tokens_a_second, max(alone.taken, shown.taken) <= TAKEN
        print(
            f"headless {alone.tokens_a_second:6.1f} (host {alone.taken:3.0%})   in the chat"
            f" {shown.tokens_a_second:6.1f} (host {shown.taken:3.0%})   ratio {ratio:.3f}"
            f"{'' if counts else ', not counted'}",
            flush=True,
        )
        if counts:
            yield ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--context", type=int, default=CONTEXT)
    given = parser.parse_args()
    model = given.model.absolute()
    with tempfile.TemporaryDirectory(prefix="ingle-decoding-") as place:
        environment = {"INGLE_STATE_DIR": place, "INGLE_DRAFTS": "off"}  # drafts would differ from reply to reply
        with serving(model, given.context, environment) as url:
            chat = ShownChat(model, environment)
            counted = list(islice(ratios(url, model, chat), given.rounds))
            chat.close()
    print(f"median of {len(counted)}: {statistics.median(counted):.3f}")


if __name__ == "__main__":
    main()
