"""By hand: histories of chats on disks that lose what was not synced: `python -m tests.torture.power_cuts --cuts 500`.

A process keeps messages, and says so; strace lists what it had the system write. Then the disk is built as the power
may have left it after any of those calls. A file's writes before its last sync are there. Of those since, any may be
there or not, whole or in sectors. Names come and go in order, and surely before the next sync of any file. Counted:
histories that do not start, that need mending, and messages said to be kept that are not there.
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
from app.history.records import Settings, State

draw = random.Random(int(sys.argv[2]))
for _ in range(3):
    with History(Path(sys.argv[1])) as history:
        chat, parent = history.chats.create(Settings()).id, None
        for turn in range(40):
            asked = history.messages.add_user_message(chat, parent, f"question {turn} " + "q" * draw.randrange(30_000))
            print(json.dumps([asked.id, asked.text]), flush=True)
            reply = history.messages.start_reply(chat, asked.id, "m")
            text = "word " * draw.randrange(5000)
            history.messages.write_reply(reply.id, text[: len(text) // 2], "")
            history.messages.write_reply(reply.id, text, "", state=State.WHOLE)
            print(json.dumps([reply.id, text]), flush=True)
            parent = reply.id
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the system that changes the disk, or what a message on standard output says is there."""

    name: str
    file: str = ""  # its name in the history's folder
    offset: int = 0  # of a write; the length, of a truncation
    content: bytes = b""


@dataclass(slots=True)
class File:
    """One file: what is on the disk for sure, and what has been asked for since."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Call] = field(default_factory=list)

    def sync(self) -> None:
        for call in self.pending:
            _apply(self.durable, call.name, call.offset, call.content)
        self.pending.clear()

    def after_a_cut(self, draw: random.Random) -> bytes:
        """What may be there then."""
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
    """The files of one folder, as calls change them."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self._removed: dict[str, File] = {}  # since the last sync

    def take(self, call: Call) -> None:
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
        """Names and contents. What the processes shared in memory is gone."""
        back = {name: file for name, file in self._removed.items() if draw.random() < 0.5 and name not in self.files}
        for name, file in {**self.files, **back}.items():
            if not name.endswith("-shm"):
                yield name, file.after_a_cut(draw)


def traced(folder: Path, log: Path, seed: int) -> list[Call]:
    """What a writer had the system do in `folder`."""
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
        return Call("said", content=strings[1]) if given.startswith("1<") else None
    path = Path((strings[-1] if name == "openat" else strings[0]).decode())
    if path.parent != folder or (name == "openat" and "O_CREAT" not in given):
        return None
    if name == "pwrite64":
        return Call(name, path.name, int(given.rsplit(", ", 1)[1]), strings[1])
    return Call(name, path.name, int(given.rsplit(", ", 1)[1]) if name == "ftruncate" else 0)


def opened(folder: Path, said: bytes) -> tuple[bool, bool, int]:
    """Whether the history starts, whether it had to be mended, and how many messages that were said to be kept are
    not."""
    kept = dict(json.loads(line) for line in said.splitlines())
    try:
        with History(folder) as history:
            chats = [chat for archived in (False, True) for chat in history.chats.listed(archived=archived)]
            found = {message.id: message.text for chat in chats for message in history.messages.in_chat(chat.id)}
            mended = history.rescue is not None
    except Exception as problem:  # noqa: BLE001  # whatever it is, it is counted
        print(f"does not start: {type(problem).__name__}: {problem}")
        return False, False, len(kept)
    return True, mended, sum(found.get(name) != text for name, text in kept.items())


def cuts(calls: list[Call], places: set[int], draw: random.Random) -> Iterator[tuple[bool, bool, int, int]]:
    """What `opened` finds at each of `places`, and how many messages had been said to be kept."""
    disk, said = Disk(), b""
    for place, call in enumerate(calls):
        if call.name == "said":
            said += call.content
        else:
            disk.take(call)
        if place in places:
            with tempfile.TemporaryDirectory(prefix="ingle-history-") as built:
                for name, content in disk.after_a_cut(draw):
                    (Path(built) / name).write_bytes(content)
                whole = said[: said.rfind(b"\n") + 1]
                yield *opened(Path(built), whole), whole.count(b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    draw = random.Random(given.seed)
    if shutil.which("strace") is None:
        parser.error("strace is not there: apt install strace")
    with tempfile.TemporaryDirectory(prefix="ingle-history-") as place:
        calls = traced(Path(place) / "history", Path(place) / "log", given.seed)
    places = set(draw.sample(range(len(calls)), min(given.cuts, len(calls))))
    rounds = list(cuts(calls, places, draw))
    print(f"seed {given.seed}: {len(calls):,} calls, cut after {len(rounds)} of them: "
          f"{sum(one[0] for one in rounds)} start, {sum(one[1] for one in rounds)} need mending; "
          f"of {sum(one[3] for one in rounds):,} messages kept, {sum(one[2] for one in rounds)} lost")  # fmt: skip


if __name__ == "__main__":
    main()
