"""By hand: downloads that are killed at random bytes by a hub in trouble, again and again until they are whole.

    python -m tests.torture.killed_downloads --kills 50

Each round is a new store. Its download is killed with SIGKILL after a random share of the bytes, then begun again. The
hub sends on to another host for the bytes, which cuts, stalls, asks for patience, forgets ranges and claims other
files, at random. Printed: how many rounds ended with the right bytes; how many bytes were sent twice, those among them
that were on their way when a connection ended; and how often the other host saw the token. A few of these run in
tests/app/models/transfer/test_killed_downloads.py.
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from app.models import hub_cache
from app.models.catalog import HubSource
from tests.app.models.fake_hub import REVISION, FakeHub, Mishap, serve

REPO = "org/Tiny"
FILE = "tiny-Q4_0.gguf"
_FORGETS = 0.05  # share of answers, of those that go wrong, that are the whole file where a part was asked for

# Forks for each line on stdin, before it has any thread: what a program imports is imported once.
FORKING = """
import os, signal, sys
from app.settings.settings import load_settings
from app.models import hub, reachability, sources
from app.models.transfer import attempts, transfer
import httpx, filelock
attempts.WAITS, transfer.STALL, reachability.PATIENCE = (0.01,) * 50, 0.3, 60.0  # a busy machine is slow, not wrong
for line in sys.stdin:
    folder, address, repo = line.split()
    child = os.fork()
    if not child:
        names = ("models_dir", "hub_cache", "ollama_dir", "lmstudio_dir")
        places = {name: f"{folder}/{name}" for name in names}
        try:
            sources.pull(repo, load_settings(hub_endpoint=address, hub_token="hf_secret", offline=False, **places))
        except BaseException as problem:
            print(f"{type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Round:
    """How one download went."""

    finished: bool
    kills: int
    right: bool  # the stored bytes are the promised ones
    loadable_early: bool  # the file was under its own name before all of it was there
    sent: int  # bytes
    size: int  # bytes


class Downloader:
    """A process that starts downloads."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, folder: Path, hub: FakeHub) -> int:
        """The process id of a new download."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder} {hub.address} {REPO}\n")
        self._process.stdin.flush()
        return self._number()

    def status(self) -> int:
        """How the last download ended; waits for it."""
        return self._number()

    def _number(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def hub_and_storage() -> Iterator[tuple[FakeHub, FakeHub]]:
    """A hub, and the host that it sends on to for the bytes."""
    with serve() as hub, serve(host="localhost") as storage:
        hub.redirect = storage.address
        yield hub, storage


def run_round(
    downloader: Downloader, hubs: tuple[FakeHub, FakeHub], folder: Path, random: Random, kills: int, size: int,
    *, flip: bool = False,
) -> Round:  # fmt: skip
    """A download of about `size` bytes that is killed so many times at random bytes, and then let be.

    With `flip`, its first answer has a wrong byte, so that a part or all of it is fetched once more.
    """
    hub, storage = hubs
    content = random.randbytes(random.randrange(size // 2, size))
    hub.repositories[REPO] = storage.repositories[REPO] = {FILE: content}
    storage.sent = 0
    final = hub_cache.snapshot_path(folder / "hub_cache", HubSource(REPO, REVISION, FILE))
    loadable_early = False
    for left in range(kills, -1, -1):
        storage.mishaps = mishaps(random, len(content))
        if flip and left == kills:
            storage.mishaps.appendleft(Mishap(flip_at=random.randrange(len(content))))
        pid = downloader.start(folder, hub)
        if left:
            limit = storage.sent + random.randrange(max(1, (len(content) - storage.sent) * 2 // (left + 1)))
            while storage.sent < limit and not final.exists() and _runs(pid):
                time.sleep(0.001)
            loadable_early |= final.exists() and hashlib.sha256(final.read_bytes()).digest() != _sha256(content)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = downloader.status()
    right = final.exists() and hashlib.sha256(final.read_bytes()).digest() == _sha256(content)
    return Round(status == 0, kills, right, loadable_early, storage.sent, len(content))


def _runs(pid: int) -> bool:
    """The process that forked it has taken note when it has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def mishaps(random: Random, size: int) -> deque[Mishap]:
    """What goes wrong with the next few answers. No bytes are wrong here: who gets those has to begin anew."""
    kinds = [
        lambda: Mishap(cut_at=random.randrange(size)),
        lambda: Mishap(stall_at=random.randrange(size)),
        lambda: Mishap(status=random.choice((429, 500, 503)), headers={"Retry-After": "0"}),
        lambda: Mishap(headers={"X-Linked-Etag": '"' + "0" * 64 + '"'}),
        lambda: Mishap(cut_at=0),
    ]
    chosen = (Mishap(ignores_range=True) if random.random() < _FORGETS else random.choice(kinds)() for _ in range(3))
    return deque(mishap for mishap in chosen if random.random() < 0.7)


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--each", type=int, default=1, help="kills of one download")
    parser.add_argument("--flips", action="store_true", help="one answer of each download has a wrong byte")
    parser.add_argument("--size", type=int, default=16_000_000, help="bytes of a file, at most")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    chosen = parser.parse_args()
    random, downloader, rounds = Random(chosen.seed), Downloader(), []
    with hub_and_storage() as hubs, tempfile.TemporaryDirectory() as scratch:
        hubs[1].pace = 0.0005
        for number in range(chosen.kills // chosen.each):
            folder = Path(scratch, str(number))
            rounds.append(run_round(downloader, hubs, folder, random, chosen.each, chosen.size, flip=chosen.flips))
            shutil.rmtree(folder)
            print(rounds[-1], flush=True)
        leaked = sum("Authorization" in headers for _, _, headers in hubs[1].requests)
    downloader.close()
    again = sum(one.sent for one in rounds) / sum(one.size for one in rounds) - 1
    good = sum(one.finished and one.right and not one.loadable_early for one in rounds)
    print(f"seed {chosen.seed}: {good} of {len(rounds)} right, {again:.1%} sent twice, {leaked} tokens elsewhere")


if __name__ == "__main__":
    main()
