"""End the real chat in a real terminal in many ways, and send it texts with terminal escape sequences.

    python -m tests.torture.killed_chats --rounds 5 --texts 2000

With `--rounds`, `ingle chat` runs in a pseudo-terminal, and its fake endpoint is in the middle of a reply. Then a key
or a signal ends the screens, SIGTERM ends the guard process, or the endpoint dies. The report has the exit status, and
whether the terminal is restored. With `--texts`, the replies contain random markup, tables, fences, escape sequences,
and very long lines, split at random. The report has the exit status, the number of escape sequences of the replies that
reached the terminal, and the time until a key press was visible.
"""

import argparse
import os
import random
import select
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.fake_endpoint import FakeEndpoint
from tests.support.terminal_screen import Ended, Terminal, children_of, python

QUIT = b"\x11"
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGSEGV", "SIGABRT", "SIGKILL")
HOSTILE = (
    "\x1b]0;{0}\x07", "\x1b]52;c;{0}\x07", "\x1b]8;;http://{0}\x1b\\", "\x1bP{0}\x1b\\", "\x1b[31;5m{0}", "\x9b31m{0}",
    "\x1b[2J{0}", "\x1bc{0}", "\x9d52;c;{0}\x9c", "\x1b[?1049l{0}", "\u202e{0}\u202c", "\x07{0}\x08\x7f",
)  # fmt: skip
PLAIN = (
    "[/] [bold {0}", "# {0}\n\n* a\n  * b\n", "| a | b |\n|---|---|\n| {0} | `x` |\n", "```py\n{0}\n",
    "~~~~\n[/{0}]\n~~~~\n",
    "[{0}](javascript:alert(1))", "![{0}](file:///etc/passwd)", "<script>{0}</script>", "> " * 40 + "{0}", "{0} " * 500,
    "{0}" * 3000, "**" * 99 + "{0}", "1. " * 60 + "{0}\n", "&#x1b;{0}&#27;", "$$\\frac{{{0}}}$$", "\\" * 50 + "{0}",
)  # fmt: skip


def start_chat(folder: Path, endpoint: FakeEndpoint) -> Terminal:
    """Start a chat and wait until it accepts input."""
    folders = {f"INGLE_{name}_DIR": str(folder / name) for name in ("STATE", "CACHE", "MODELS")}
    terminal = Terminal(python("-m", "app", "chat", "--endpoint", endpoint.url), folders)
    terminal.resize(120, 40)
    terminal.read_until(lambda output: b"sk anything" in output)  # the "A" is left out, because the cursor may cover it
    return terminal


def read_until_quiet(terminal: Terminal, seconds: float = 0.4) -> None:
    """Read until the terminal has received almost nothing for `seconds`. The blinking cursor sends short sequences."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if select.select([terminal.master], [], [], 0.02)[0]:
            part = os.read(terminal.master, 65536)
            terminal.output += part
            if len(part) > 400:
                until = time.monotonic() + seconds


def send_message(terminal: Terminal, endpoint: FakeEndpoint, *, whole: bool = True) -> None:
    asked, done = len(endpoint.asked), endpoint.done
    os.write(terminal.master, b"x\r")
    terminal.read_until(lambda output: len(endpoint.asked) > asked and (not whole or endpoint.done > done))
    read_until_quiet(terminal)


def run_and_end(act: Callable[[Terminal], None], *, endpoint_dies: bool = False) -> Ended:
    with tempfile.TemporaryDirectory(prefix="ingle-chat-") as folder:
        endpoint = FakeEndpoint([["It ", "goes ", "on."]])
        endpoint.usage = None
        with endpoint:
            terminal = start_chat(Path(folder), endpoint)
            endpoint.hold()
            send_message(terminal, endpoint, whole=False)
            if not endpoint_dies:
                act(terminal)
                return terminal.ended()
        act(terminal)
        return terminal.ended()


def kill_screens(name: str) -> Callable[[Terminal], None]:
    return lambda terminal: os.kill(children_of(terminal.pid)[0], getattr(signal, name))


def press_quit(terminal: Terminal) -> None:
    read_until_quiet(terminal)
    os.write(terminal.master, QUIT)


def check_ends(rounds: int) -> None:
    ways: dict[str, tuple[Callable[[Terminal], None], bool]] = {
        "a key": (press_quit, False),
        "the endpoint dies, then a key": (press_quit, True),
        "SIGTERM to the guard": (lambda terminal: os.kill(terminal.pid, signal.SIGTERM), False),
        **{f"{name} to the screens": (kill_screens(name), False) for name in SIGNALS},
    }
    num_restored = 0
    for way, (act, endpoint_dies) in ways.items():
        for _ in range(rounds):
            ended = run_and_end(act, endpoint_dies=endpoint_dies)
            is_restored = not ended.modes and ended.attributes_are_back
            num_restored += is_restored
            print(
                f"{way}: status {ended.status}, {'restored' if is_restored else f'NOT RESTORED {sorted(ended.modes)}'}"
            )
    print(f"{num_restored} of {len(ways) * rounds} terminals are restored")


def check_texts(count: int, draw: random.Random) -> None:
    sequences = [draw.choice(HOSTILE).format(f"evil{number}") for number in range(count)]
    replies = []
    for start in range(0, count, 20):
        text = "".join(
            draw.choice(PLAIN).format(f"word{start}") + one + draw.choice(("", "\n"))
            for one in sequences[start : start + 20]
        )
        cuts = sorted(draw.randrange(len(text)) for _ in range(draw.randrange(1, 30)))
        replies.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    with tempfile.TemporaryDirectory(prefix="ingle-chat-") as folder, FakeEndpoint(replies) as endpoint:
        terminal = start_chat(Path(folder), endpoint)
        pauses = []
        for number in range(len(replies)):
            send_message(terminal, endpoint)
            started, seen = time.monotonic(), len(terminal.output)
            word = f"k{number}q".encode()
            os.write(terminal.master, word[:1])
            terminal.read_until(lambda output, seen=seen: len(output) > seen)  # type: ignore[misc]
            pauses.append(time.monotonic() - started)
            os.write(terminal.master, b"\x15\x7f")
            read_until_quiet(terminal, 0.1)
        os.write(terminal.master, QUIT)
        ended = terminal.ended()
    reached = sum(one.encode("utf-8", "surrogatepass") in ended.output for one in sequences)
    raw = sum(ended.output.count(sign) for sign in (b"\x1b]52", b"\x1b]8;;http", b"\x1bP", b"\xc2\x9b", b"\xc2\x9d"))
    print(f"{count} texts in {len(replies)} replies: status {ended.status}, {reached} of their sequences and {raw} of "
          f"their kinds in {len(ended.output)} bytes; a key press was visible after {statistics.median(pauses):.3f} s, "
          f"{max(pauses):.3f} s at most")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--texts", type=int, default=0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    if arguments.rounds:
        check_ends(arguments.rounds)
    if arguments.texts:
        check_texts(arguments.texts, random.Random(arguments.seed))


if __name__ == "__main__":
    main()
