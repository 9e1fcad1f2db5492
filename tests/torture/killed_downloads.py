"""Kill downloads from an unreliable hub at random bytes, and restart them until they are complete.

    python -m tests.torture.killed_downloads --kills 50

Each round uses a new store. Its download is killed with SIGKILL after a random number of bytes, then restarted. The hub
redirects to another host for the bytes. At random, this host cuts connections, stalls, sends Retry-After, ignores
ranges, and claims to have a different file. The report has the number of rounds that ended with the right bytes, the
share of bytes that were sent twice (including bytes in transit when a connection ended), and how often the other host
received the token. tests/app/models/transfer/test_killed_downloads.py runs some of these rounds.
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
# share of the failing responses in which the host ignores the requested range and sends the whole file
_IGNORES_RANGE = 0.05

# A program that forks a child for each line on stdin. It imports all modules once and has no threads when it forks.
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
        folders = {name: f"{folder}/{name}" for name in names}
        try:
            sources.pull(repo, load_settings(hub_endpoint=address, hub_token="hf_secret", offline=False, **folders))
        except BaseException as problem:
            print(f"{type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Round:
    """The result of one download."""

    is_finished: bool
    kills: int
    is_intact: bool  # whether the stored bytes are correct
    is_loadable_early: bool  # whether the file had its final name before it was complete
    sent: int  # bytes sent by the host
    size: int  # size of the file in bytes


class Downloader:
    """A process that forks a child for each download."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, folder: Path, hub: FakeHub) -> int:
        """Start a download and return the process id of its child."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder} {hub.address} {REPO}\n")
        self._process.stdin.flush()
        return self._read_number()

    def status(self) -> int:
        """Wait until the last download ends, and return its exit status."""
        return self._read_number()

    def _read_number(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def hub_and_storage() -> Iterator[tuple[FakeHub, FakeHub]]:
    """Serve a hub, and the host to which it redirects downloads."""
    with serve() as hub, serve(host="localhost") as storage:
        hub.redirect = storage.address
        yield hub, storage


def run_round(
    downloader: Downloader, hubs: tuple[FakeHub, FakeHub], folder: Path, random: Random, kills: int, size: int,
    *, flip: bool = False,
) -> Round:  # fmt: skip
    """Run a download of a file of at most `size` bytes, which is killed `kills` times at random bytes and then
    completes.

    With `flip`, its first response has a wrong byte, so that some or all of the file is downloaded again.
    """
    hub, storage = hubs
    content = random.randbytes(random.randrange(size // 2, size))
    hub.repositories[REPO] = storage.repositories[REPO] = {FILE: content}
    storage.sent = 0
    final = hub_cache.snapshot_path(folder / "hub_cache", HubSource(REPO, REVISION, FILE))
    is_loadable_early = False
    for left in range(kills, -1, -1):
        storage.mishaps = mishaps(random, len(content))
        if flip and left == kills:
            storage.mishaps.appendleft(Mishap(flip_at=random.randrange(len(content))))
        pid = downloader.start(folder, hub)
        if left:
            limit = storage.sent + random.randrange(max(1, (len(content) - storage.sent) * 2 // (left + 1)))
            while storage.sent < limit and not final.exists() and _runs(pid):
                time.sleep(0.001)
            is_loadable_early |= final.exists() and hashlib.sha256(final.read_bytes()).digest() != _sha256(content)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = downloader.status()
    is_intact = final.exists() and hashlib.sha256(final.read_bytes()).digest() == _sha256(content)
    return Round(status == 0, kills, is_intact, is_loadable_early, storage.sent, len(content))


def _runs(pid: int) -> bool:
    """Whether the process still exists. Its parent reaps it as soon as it ends."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def mishaps(random: Random, size: int) -> deque[Mishap]:
    """Return random failures for the next responses.

    None of them changes bytes, because a download with wrong bytes starts again from the first byte.
    """
    kinds = [
        lambda: Mishap(cut_at=random.randrange(size)),
        lambda: Mishap(stall_at=random.randrange(size)),
        lambda: Mishap(status=random.choice((429, 500, 503)), headers={"Retry-After": "0"}),
        lambda: Mishap(headers={"X-Linked-Etag": '"' + "0" * 64 + '"'}),
        lambda: Mishap(cut_at=0),
    ]
    chosen = (
        Mishap(ignores_range=True) if random.random() < _IGNORES_RANGE else random.choice(kinds)() for _ in range(3)
    )
    return deque(mishap for mishap in chosen if random.random() < 0.7)


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--each", type=int, default=1, help="kills per download (default: 1)")
    parser.add_argument("--flips", action="store_true", help="flip one byte in the first response of each download")
    parser.add_argument(
        "--size", type=int, default=16_000_000, help="maximum size of a file in bytes (default: 16000000)"
    )
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
    good = sum(one.is_finished and one.is_intact and not one.is_loadable_early for one in rounds)
    print(
        f"seed {chosen.seed}: {good} of {len(rounds)} intact, {again:.1%} sent twice, "
        f"{leaked} requests to the other host with the token"
    )


if __name__ == "__main__":
    main()
