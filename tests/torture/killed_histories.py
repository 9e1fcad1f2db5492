"""By hand: histories of chats whose writer is killed, and that several programs write at once.

    python -m tests.torture.killed_histories --kills 200 --writers 4 --seconds 20

Kills: a process says what it has kept, on a pipe, while it asks and streams replies in a loop; it is killed with
SIGKILL after a random time. Counted: what it had said and is not there; files that SQLite's own check finds damaged;
how far a reply was behind what had come. Writers: processes write and read one file for some seconds. Counted: errors
of any kind.
"""

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from app.chat_backend.replies import SAVE_SECONDS
from app.history.database import FILE_NAME
from app.history.history import History

# Streams replies as app/chat_backend/replies.py does, and says what is on the disk, and what has come, line by line.
WRITER = """
import json, sys, time
from pathlib import Path
from app.history.history import History
from app.history.records import Settings, State
from app.chat_backend.replies import SAVE_SECONDS

def say(*what):
    sys.stdout.write(json.dumps(what) + "\\n")
    sys.stdout.flush()

history = History(Path(sys.argv[1]))
chat = history.chats.create(Settings())
say("chat", chat.id)
parent, turn = None, 0
while True:
    turn += 1
    asked = history.messages.add_user_message(chat.id, parent, f"question {turn} " + "x" * (turn * 37 % 5000))
    say("asked", chat.id, asked.id, asked.text)
    reply = history.messages.start_reply(chat.id, asked.id, "m")
    text, kept_at = "", time.monotonic()
    for word in range(turn % 40):
        text += f"word{word} "
        say("came", chat.id, reply.id, len(text), time.time())
        if time.monotonic() - kept_at >= SAVE_SECONDS:
            history.messages.write_reply(reply.id, text, "")
            kept_at = time.monotonic()
        time.sleep(0.02)
    history.messages.write_reply(reply.id, text, "", state=State.WHOLE)
    say("ended", chat.id, reply.id, text)
    parent = reply.id
"""
SHARER = """
import sys, time
from pathlib import Path
from app.history.history import History
from app.history.records import Settings

history = History(Path(sys.argv[1]))
chat, until, turns = history.chats.create(Settings()), time.monotonic() + float(sys.argv[2]), 0
parent = None
while time.monotonic() < until:
    parent = history.messages.add_user_message(chat.id, parent, f"turn {turns} of {chat.id}").id
    history.chats.listed()
    history.search.find("turn")
    turns += 1
assert len(history.messages.in_chat(chat.id)) == turns
print(turns)
"""


def killed(folder: Path, draw: random.Random) -> tuple[int, int, bool, float]:
    """What a writer had said to be there, how much of it is not, whether the file is sound, and by how many seconds the
    reply it was killed in was behind."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = [json.loads(process.stdout.readline())]
    time.sleep(draw.uniform(0.0, 2.0))
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate()
    now = time.time()
    for line in rest.splitlines():
        with suppress(ValueError):  # the last one may be half
            said.append(json.loads(line))
    with sqlite3.connect(folder / FILE_NAME) as connection:
        sound = connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found = dict(connection.execute("SELECT id, text FROM messages"))
    connection.close()
    kept = [what for what in said if what[0] in ("asked", "ended")]
    lost = sum(found.get(what[2]) != what[3] for what in kept)
    came = [what for what in said if what[0] == "came" and len(found.get(what[2], "")) < what[3]]
    last = {what[2] for what in said if what[0] == "came"}
    behind = now - min((what[4] for what in came if what[2] == max(last)), default=now)
    return len(kept), lost, sound, behind


def kills(count: int, draw: random.Random) -> None:
    with tempfile.TemporaryDirectory(prefix="ingle-history-") as place:
        rounds = [killed(Path(place), draw) for _ in range(count)]
        with History(Path(place)) as history:
            told = [notice.sentences for notice in history.notices]
    acknowledged, lost = sum(one[0] for one in rounds), sum(one[1] for one in rounds)
    print(
        f"{count} kills: {acknowledged} messages acknowledged, {lost} lost; {sum(one[2] for one in rounds)} files sound"
    )
    behind = max(one[3] for one in rounds)
    print(f"a reply was behind by {behind:.2f} s at most ({SAVE_SECONDS} is meant); told: {told}")


def writers(count: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="ingle-history-") as place:
        command = [sys.executable, "-c", SHARER, place, str(seconds)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(count)]
        ended = [process.communicate() for process in running]
        turns = sum(int(out or 0) for out, _ in ended)
        errors = sum(process.returncode != 0 for process in running)
        for _, err in ended:
            sys.stdout.write(err.decode())
    print(f"{count} programs on one file for {seconds:g} s: {turns} messages, {errors} errors")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--writers", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    print(f"seed {given.seed}, process {os.getpid()}")
    draw = random.Random(given.seed)
    if given.kills:
        kills(given.kills, draw)
    if given.writers:
        writers(given.writers, given.seconds)


if __name__ == "__main__":
    main()
