"""Kill a process that writes a chat history, and let several programs write one history at the same time.

    python -m tests.torture.killed_histories --kills 200 --writers 4 --seconds 20

With `--kills`, a process stores questions and streamed replies in a loop, and prints which messages it has stored. It
is killed with SIGKILL after a random time. The report counts stored messages that are lost and files that fail SQLite's
integrity check, and has the longest time for which a part of a reply had not been saved. With `--writers`, several
processes write and read one file for `--seconds`, and the report counts their errors.
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

# A program that stores replies like app/chat_backend/replies.py, and prints a line for each stored message and each
# received piece.
WRITER = """
import json, sys, time
from pathlib import Path
from app.history.history import History
from app.history.records import ChatSettings, State
from app.chat_backend.replies import SAVE_SECONDS

def report(*event):
    sys.stdout.write(json.dumps(event) + "\\n")
    sys.stdout.flush()

history = History(Path(sys.argv[1]))
chat = history.chats.create(ChatSettings())
report("chat", chat.id)
parent, turn = None, 0
while True:
    turn += 1
    sent = history.messages.add_user_message(chat.id, parent, f"question {turn} " + "x" * (turn * 37 % 5000))
    report("sent", chat.id, sent.id, sent.text)
    reply = history.messages.start_reply(chat.id, sent.id, "m")
    text, kept_at = "", time.monotonic()
    for word in range(turn % 40):
        text += f"word{word} "
        report("received", chat.id, reply.id, len(text), time.time())
        if time.monotonic() - kept_at >= SAVE_SECONDS:
            history.messages.write_reply(reply.id, text, "")
            kept_at = time.monotonic()
        time.sleep(0.02)
    history.messages.write_reply(reply.id, text, "", state=State.WHOLE)
    report("ended", chat.id, reply.id, text)
    parent = reply.id
"""
CONCURRENT_WRITER = """
import sys, time
from pathlib import Path
from app.history.history import History
from app.history.records import ChatSettings

history = History(Path(sys.argv[1]))
chat, until, turns = history.chats.create(ChatSettings()), time.monotonic() + float(sys.argv[2]), 0
parent = None
while time.monotonic() < until:
    parent = history.messages.add_user_message(chat.id, parent, f"turn {turns} of {chat.id}").id
    history.chats.listed()
    history.search.find("turn")
    turns += 1
assert len(history.messages.in_chat(chat.id)) == turns
print(turns)
"""


def kill_writer(folder: Path, draw: random.Random) -> tuple[int, int, bool, float]:
    """Kill a writer after a random time.

    Return the number of messages that it reported as stored, how many of them are lost, whether the file is intact, and
    the age in seconds of the oldest unsaved piece of the reply in progress.
    """
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    events = [json.loads(process.stdout.readline())]
    time.sleep(draw.uniform(0.0, 2.0))
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate()
    now = time.time()
    for line in rest.splitlines():
        with suppress(ValueError):  # the last line may be incomplete
            events.append(json.loads(line))
    with sqlite3.connect(folder / FILE_NAME) as connection:
        sound = connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found = dict(connection.execute("SELECT id, text FROM messages"))
    connection.close()
    kept = [event for event in events if event[0] in ("sent", "ended")]
    lost = sum(found.get(event[2]) != event[3] for event in kept)
    received = [event for event in events if event[0] == "received" and len(found.get(event[2], "")) < event[3]]
    last = {event[2] for event in events if event[0] == "received"}
    delay = now - min((event[4] for event in received if event[2] == max(last)), default=now)
    return len(kept), lost, sound, delay


def kill_writers(count: int, draw: random.Random) -> None:
    with tempfile.TemporaryDirectory(prefix="ingle-history-") as folder:
        rounds = [kill_writer(Path(folder), draw) for _ in range(count)]
        with History(Path(folder)) as history:
            notices = [notice.sentences for notice in history.notices]
    acknowledged, lost = sum(one[0] for one in rounds), sum(one[1] for one in rounds)
    print(
        f"{count} kills: {acknowledged} messages acknowledged, {lost} lost; "
        f"{sum(one[2] for one in rounds)} files intact"
    )
    delay = max(one[3] for one in rounds)
    print(f"a reply was saved at most {delay:.2f} s late (limit: {SAVE_SECONDS}); notices: {notices or 'none'}")


def run_writers(count: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="ingle-history-") as folder:
        command = [sys.executable, "-c", CONCURRENT_WRITER, folder, str(seconds)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(count)]
        ended = [process.communicate() for process in running]
        turns = sum(int(out or 0) for out, _ in ended)
        errors = sum(process.returncode != 0 for process in running)
        for _, err in ended:
            sys.stdout.write(err.decode())
    print(f"{count} programs on one file for {seconds:g} s: {turns} messages, {errors} errors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--writers", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, process {os.getpid()}")
    draw = random.Random(arguments.seed)
    if arguments.kills:
        kill_writers(arguments.kills, draw)
    if arguments.writers:
        run_writers(arguments.writers, arguments.seconds)


if __name__ == "__main__":
    main()
