"""Kill an engine with states of 1 MiB, which uses the disk tier, in the middle of a conversation, and start it again.

    python -m tests.torture.killed_states --kills 200

A process continues one conversation, with the hash model and small pools, and prints its progress. It is killed with
SIGKILL after a random time. The next process continues the conversation from its last complete turn. The report counts
wrong tokens, and the tokens that the first turn after a kill had to compute although they had been written.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.config import GroupConfig
from engine.kv.disk.quota import Quota
from engine.kv.disk.store import DiskStore
from tests.engine.hash_run import ENDS, Run
from tests.support.hash_model import block_bytes, hash_engine

SPACING = 256
GROUPS = (
    GroupConfig(block_bytes=64 << 10),
    GroupConfig(window=24, block_bytes=16),
    GroupConfig(recurrent=True, spacing=SPACING, block_bytes=1 << 20),
)
LONGEST = 4000  # tokens of a conversation; then the next one starts
REPLY_TOKENS = 40


def converse(folder: Path, seed: int, path: list[int]) -> None:
    """Continue a conversation until killed. Prints a line for each reply, and after its blocks have been written."""
    chance = random.Random(seed)
    store = DiskStore(folder / "model", bytes(32), block_bytes(GROUPS), Quota(folder, 256 << 20))
    engine, _ = hash_engine(seed=seed, num_blocks=400, depth=1 + seed % 2, budget=128, groups=GROUPS, store=store)
    run = Run(engine)
    while True:
        if len(path) > LONGEST:
            path = []
        prompt = (*path, *(chance.randrange(100, 5000) for _ in range(chance.randrange(20, 200))), min(ENDS))
        request = run.submit(prompt, max_tokens=REPLY_TOKENS, ignore_eos=True)
        while request.id not in run.finished:
            run.step()
        run.check()
        known, path = path, [*prompt, *run.outputs[request.id]]
        print(json.dumps(["reply", len(known), request.num_cached, path]), flush=True)
        if chance.random() < 0.7:
            engine.flush()
            print(json.dumps(["written", len(path)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        converse(Path(arguments.child[0]), int(arguments.child[1]), json.loads(sys.stdin.readline()))
        return
    chance = random.Random(1)
    replies, failures, lost, restarts = 0, 0, list[int](), 0
    path: list[int] = []
    written = 0
    with tempfile.TemporaryDirectory(prefix="killed-states-") as folder:
        for seed in range(arguments.kills):
            lines = _until_killed(Path(folder), seed, path, chance.uniform(0.02, 1.5))
            for number, line in enumerate(lines):
                match line:
                    case ["reply", known, cached, after]:
                        replies += 1
                        if number == 0 and known:
                            restarts += 1
                            lost.append(min(written, known) - cached)
                        written = written if known else 0
                        path = after
                    case ["written", tokens]:
                        written = tokens
                    case ["failed"]:
                        failures += 1
    print(f"{arguments.kills} kills, {replies:,} replies, {failures} processes failed")
    print(f"{restarts} first turns computed at most {max(lost, default=0)} tokens that had been written")


def _until_killed(folder: Path, seed: int, path: list[int], seconds: float) -> list[list[Any]]:
    """Return what a process prints within `seconds` after its first line."""
    command = [sys.executable, "-m", "tests.torture.killed_states", "--child", str(folder), str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(path) + "\n")
        process.stdin.flush()
        first = process.stdout.readline()
        time.sleep(seconds)
        failed = process.poll() is not None
        process.kill()
        lines = [first, *process.stdout.read().splitlines(keepends=True)]
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [*whole, ["failed"]] if failed else whole


if __name__ == "__main__":
    main()
