"""Kill chats that share a history: `python -m tests.torture.killed_sharers --kills 30`.

Several `ingle chat --plain` processes send questions to an endpoint that streams short replies. A random one of them is
killed with SIGKILL at a random time and restarted while the others continue; sometimes all of them are killed. After
each kill, the program checks the history. The report counts questions that the endpoint received and complete replies
that a chat has shown but that are not in the history, and lists notices about damage.
"""

import argparse
import os
import random
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.history.history import History
from app.history.records import State
from tests.support.fake_endpoint import FakeEndpoint
from tests.support.terminal_screen import HANGING_SECONDS, ROOT, python

PIECE_SECONDS = 0.02
LINES = 2000  # questions per chat, more than a chat can send before it is killed


@dataclass(slots=True)
class PlainChat:
    """One chat process, whose input is written in advance."""

    process: subprocess.Popen[bytes]
    shown: bytes = b""

    @classmethod
    def start(cls, state: Path, endpoint: FakeEndpoint, name: str) -> "PlainChat":
        command = python("-m", "app", "chat", "--plain", "--endpoint", endpoint.url)
        environment = {**os.environ, "INGLE_STATE_DIR": str(state), "INGLE_CACHE_DIR": str(state / "cache")}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write("".join(f"question {line} of {name}\n" for line in range(LINES)).encode())
        process.stdin.flush()
        return cls(process)

    def read(self, *, to_end: bool = False) -> None:
        """Read the available output; with `to_end`, read until end of file."""
        if self.process.stdout is None or self.process.stdout.closed:
            return
        descriptor = self.process.stdout.fileno()
        while select.select([descriptor], [], [], None if to_end else 0)[0]:
            part = os.read(descriptor, 1 << 16)
            if not part:
                break
            self.shown += part

    def kill(self) -> str:
        """Kill the process and return its standard error, without the notices that it waits for another process."""
        self.process.send_signal(signal.SIGKILL)
        self.read(to_end=True)
        _, notices = self.process.communicate()
        lines = notices.decode().splitlines(keepends=True)
        return "".join(line for line in lines if "Waiting for" not in line)

    @property
    def replies(self) -> list[str]:
        """The replies that the chat has shown completely."""
        return [line for line in self.shown.decode(errors="replace").split("\n")[:-1] if line.startswith("answer ")]


@dataclass(slots=True)
class Count:
    """Totals over all kills."""

    kills: int = 0
    sent: int = 0  # number of questions and complete replies
    lost: set[str] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)  # notices about the history; there should be none


def prepared_replies(count: int) -> list[list[str]]:
    return [[f"answer {number} ", *("goes on " for _ in range(number % 30)), "to its end."] for number in range(count)]


def kill_rounds(kills: int, num_chats: int, draw: random.Random) -> Count:
    """Kill chats that share a history, and check that everything that they sent and showed is in the history."""
    count = Count()
    with (
        tempfile.TemporaryDirectory(prefix="ingle-history-") as name,
        FakeEndpoint(prepared_replies(100_000)) as endpoint,
    ):
        endpoint.pause = PIECE_SECONDS
        state, started, dead = Path(name), 0, list[PlainChat]()
        chats = [PlainChat.start(state, endpoint, f"chat {number}") for number in range(num_chats)]
        while count.kills < kills:
            _wait_for_replies(chats)
            time.sleep(draw.uniform(0.0, 1.0))
            killed = list(chats) if draw.random() < 0.2 else [draw.choice(chats)]
            count.notices += [notices for chat in killed if "history" in (notices := chat.kill())]
            count.kills += len(killed)
            dead += killed
            _check_history(state, endpoint, [*chats, *dead], count)
            started += len(killed)
            names = (f"chat {num_chats + started + number}" for number in range(len(killed)))
            chats = [chat for chat in chats if chat not in killed]
            chats += [PlainChat.start(state, endpoint, each) for each in names]
        for chat in chats:
            chat.kill()
        _check_history(state, endpoint, [*chats, *dead], count)
    return count


def _wait_for_replies(chats: Sequence[PlainChat]) -> None:
    """Wait until each of the chats has shown a complete reply."""
    deadline = time.monotonic() + HANGING_SECONDS
    while not all(chat.replies for chat in chats):
        for chat in chats:
            chat.read()
        assert time.monotonic() < deadline, [chat.shown[-200:] for chat in chats]
        time.sleep(0.02)


def _check_history(state: Path, endpoint: FakeEndpoint, chats: Sequence[PlainChat], count: Count) -> None:
    asked = {str(request["messages"][-1]["content"]) for request in list(endpoint.asked)}
    for chat in chats:
        chat.read()
    replies = {reply for chat in chats for reply in chat.replies}
    with History(state / "history") as history:
        count.notices += [notice.sentences for notice in history.notices]
        messages = [message for chat in history.chats.listed() for message in history.messages.in_chat(chat.id)]
    whole = {message.text for message in messages if message.state is State.WHOLE}
    count.sent = len({one for one in asked if one.startswith("question ")}) + len(replies)
    count.lost |= {one for one in asked if one.startswith("question ")} - whole
    count.lost |= replies - whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--chats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    arguments = parser.parse_args()
    count = kill_rounds(arguments.kills, arguments.chats, random.Random(arguments.seed))
    print(
        f"seed {arguments.seed}: {count.kills} kills among {arguments.chats} chats: "
        f"of {count.sent:,} questions and replies "
        f"{len(count.lost)} lost; notices: {count.notices or 'none'}"
    )


if __name__ == "__main__":
    main()
