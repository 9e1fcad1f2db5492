"""Simulate power cuts on disks that lose unsynced writes: `python -m tests.torture.power_cuts --cuts 500`.

A process stores messages and prints each stored one, and strace records its system calls. Then the program creates a
state of the disk that a power cut after one of the calls can cause. Writes to a file before its last sync are on disk.
Any subset of the later writes may be on disk, whole or in sectors. Files are created and removed in order, at the
latest at the next sync of any file. The report counts histories that do not open or need a repair, and printed messages
that are lost.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from app.history.history import History

SECTOR = 512
CALLS = "openat,write,pwrite64,ftruncate,fsync,fdatasync,unlink"
LINE = re.compile(r"(\w+)\((.*)\) += (\d+)")
WRITER = """
import json, random, sys
from pathlib import Path
from app.history.history import History
from app.history.records import ChatSettings, State

draw = random.Random(int(sys.argv[2]))
for _ in range(3):
    with History(Path(sys.argv[1])) as history:
        chat, parent = history.chats.create(ChatSettings()).id, None
        for turn in range(40):
            sent = history.messages.add_user_message(chat, parent, f"question {turn} " + "q" * draw.randrange(30_000))
            print(json.dumps([sent.id, sent.text]), flush=True)
            reply = history.messages.start_reply(chat, sent.id, "m")
            text = "word " * draw.randrange(5000)
            history.messages.write_reply(reply.id, text[: len(text) // 2], "")
            history.messages.write_reply(reply.id, text, "", state=State.WHOLE)
            print(json.dumps([reply.id, text]), flush=True)
            parent = reply.id
"""


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that changes the disk, or a line on standard output."""

    name: str
    file: str = ""  # name of the file in the history's folder
    offset: int = 0  # byte offset of a write, or the new size for a truncation
    content: bytes = b""


@dataclass(slots=True)
class File:
    """A file: the bytes that are on disk since the last sync, and the later writes."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Call] = field(default_factory=list)

    def sync(self) -> None:
        for call in self.pending:
            _apply(self.durable, call.name, call.offset, call.content)
        self.pending.clear()

    def after_a_cut(self, draw: random.Random) -> bytes:
        """Return random content that the file may have after a power cut."""
        content, share = bytearray(self.durable), draw.choice((0.1, 0.5, 0.9, 1.0))
        for call in self.pending:
            if draw.random() < share:
                _apply(content, call.name, call.offset, call.content)
            elif call.name == "pwrite64":
                for start in range(0, len(call.content), SECTOR):
                    if draw.random() < share / 4:
                        _apply(content, call.name, call.offset + start, call.content[start : start + SECTOR])
        return bytes(content)


def _apply(content: bytearray, name: str, offset: int, written: bytes) -> None:
    if name == "ftruncate":
        content[offset:] = bytes(max(0, offset - len(content)))
    else:
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(written)] = written


class Disk:
    """A simulated disk with the files of one folder, to which system calls are applied."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self._removed: dict[str, File] = {}  # files that were removed since the last sync

    def apply(self, call: Call) -> None:
        match call.name:
            case "unlink":
                self._removed[call.file] = self.files.pop(call.file, File())
            case "openat":
                self.files.setdefault(call.file, File())
            case "fsync" | "fdatasync":
                self.files.setdefault(call.file, File()).sync()
                self._removed.clear()
            case _:
                self.files.setdefault(call.file, File()).pending.append(call)

    def after_a_cut(self, draw: random.Random) -> Iterator[tuple[str, bytes]]:
        """Yield the names and contents of the files after a power cut, without SQLite's shared memory file."""
        back = {name: file for name, file in self._removed.items() if draw.random() < 0.5 and name not in self.files}
        for name, file in {**self.files, **back}.items():
            if not name.endswith("-shm"):
                yield name, file.after_a_cut(draw)


def trace_writer(folder: Path, log: Path, seed: int) -> list[Call]:
    """Run a writer in `folder` with strace and return its system calls."""
    command = ["strace", "-y", "-xx", "-s", str(1 << 20), "-e", f"trace={CALLS}", "-o", str(log)]
    subprocess.run([*command, sys.executable, "-c", WRITER, str(folder), str(seed)], check=True, stdout=subprocess.PIPE)
    return [call for line in log.read_text().splitlines() if (call := _call(line, folder)) is not None]


def _call(line: str, folder: Path) -> Call | None:
    found = LINE.match(line)
    if found is None:
        return None
    name, given, _ = found.groups()
    strings = [bytes.fromhex(text.replace("\\x", "")) for text in re.findall(r'[<"]((?:\\x[0-9a-f]{2})*)[>"]', given)]
    if name == "write":
        return Call("reported", content=strings[1]) if given.startswith("1<") else None
    path = Path((strings[-1] if name == "openat" else strings[0]).decode())
    if path.parent != folder or (name == "openat" and "O_CREAT" not in given):
        return None
    if name == "pwrite64":
        return Call(name, path.name, int(given.rsplit(", ", 1)[1]), strings[1])
    return Call(name, path.name, int(given.rsplit(", ", 1)[1]) if name == "ftruncate" else 0)


def open_history(folder: Path, reported: bytes) -> tuple[bool, bool, int]:
    """Return whether the history opens, whether it was repaired, and how many reported messages are lost."""
    kept = dict(json.loads(line) for line in reported.splitlines())
    try:
        with History(folder) as history:
            chats = [chat for archived in (False, True) for chat in history.chats.listed(archived=archived)]
            found = {message.id: message.text for chat in chats for message in history.messages.in_chat(chat.id)}
            repaired = history.rescue is not None
    except Exception as problem:  # noqa: BLE001 # any failure counts
        print(f"does not start: {type(problem).__name__}: {problem}")
        return False, False, len(kept)
    return True, repaired, sum(found.get(name) != text for name, text in kept.items())


def simulate_cuts(calls: list[Call], indexes: set[int], draw: random.Random) -> Iterator[tuple[bool, bool, int, int]]:
    """Simulate a power cut after each call in `indexes`. Yields the results of `open_history` and the number of
    reported messages.
    """
    disk, reported = Disk(), b""
    for index, call in enumerate(calls):
        if call.name == "reported":
            reported += call.content
        else:
            disk.apply(call)
        if index in indexes:
            with tempfile.TemporaryDirectory(prefix="ingle-history-") as built:
                for name, content in disk.after_a_cut(draw):
                    (Path(built) / name).write_bytes(content)
                whole = reported[: reported.rfind(b"\n") + 1]
                yield *open_history(Path(built), whole), whole.count(b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    draw = random.Random(given.seed)
    if shutil.which("strace") is None:
        parser.error("strace is not installed. Run: apt install strace")
    with tempfile.TemporaryDirectory(prefix="ingle-history-") as folder:
        calls = trace_writer(Path(folder) / "history", Path(folder) / "log", given.seed)
    indexes = set(draw.sample(range(len(calls)), min(given.cuts, len(calls))))
    rounds = list(simulate_cuts(calls, indexes, draw))
    print(f"seed {given.seed}: {len(calls):,} calls, cut after {len(rounds)} of them: "
          f"{sum(one[0] for one in rounds)} start, {sum(one[1] for one in rounds)} need a repair; "
          f"of {sum(one[3] for one in rounds):,} messages reported, {sum(one[2] for one in rounds)} lost")  # fmt: skip


if __name__ == "__main__":
    main()
