"""By hand: damaged histories of chats: `python -m tests.torture.damaged_histories --flips 1000 --cuts 100`.

Each case copies a sound history, flips 1 to 8 bits anywhere in its file or its log, or cuts one of them, and opens the
copy. Afterwards every chat and message is compared with the sound one. Counted: histories that do not open, chats and
messages that are missing or changed, and histories whose news does not account for all of them. Each case has a number,
by which it can be run again.
"""

import argparse
import os
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from app.history.database import FILE_NAME, Database
from app.history.history import History
from app.history.notices import Rescue
from app.history.records import Attachment, Chat, ChatSettings, State, StoredMessage
from app.history.refill import RESCUED_TITLE

LOG, INDEX = f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"
TURNS = 10  # of each chat
SHAPES = ((20, 0), (19, 1), (0, 4))  # chats in the file, and chats that are in the log alone

Harm = Callable[[Path, random.Random], str]
Content = tuple[dict[int, Chat], dict[int, StoredMessage]]


@dataclass(frozen=True, slots=True)
class Sound:
    """A history as its files are, and what is in it."""

    folder: Path
    content: Content


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one damaged history."""

    opens: bool
    total: int = 0  # chats and messages
    missing: int = 0
    changed: int = 0
    untold: str = ""  # what is missing or changed and was not told
    is_mended: bool = False
    opens_again: bool = True  # as it was left, with nothing more to mend


def sound(folder: Path, shape: tuple[int, int]) -> Sound:
    """A history in `folder`, with so many chats in its file and in its log."""
    work, draw, (in_file, in_log) = folder / "work", random.Random(1), shape
    with History(work) as history, patch.object(Database, "checkpoint"):
        history._database._opened.connection.execute("PRAGMA synchronous = OFF")
        for number in range(in_file):
            _talk(history, draw, number)
    with History(work) as history, patch.object(Database, "checkpoint"):
        history._database._opened.connection.execute("PRAGMA synchronous = OFF")
        history._database._opened.connection.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
        for number in range(in_file, in_file + in_log):
            _talk(history, draw, number)
        content = _content(history)
        files = [path for path in work.glob(f"{FILE_NAME}*") if path.stat().st_size]
        (folder / "sound").mkdir()
        for path in files:
            shutil.copy(path, folder / "sound")
    return Sound(folder / "sound", content)


def _talk(history: History, draw: random.Random, number: int) -> None:
    chat = history.chats.create(ChatSettings(system=f"Be number {number}."), f"chat {number}" if number % 3 else "").id
    parent = None
    for turn in range(TURNS):
        files = [Attachment("notes.txt", "note " * draw.randrange(400))] if turn == 4 else []
        parent = history.messages.add_user_message(
            chat, parent, f"question {turn} " + "lorem ipsum " * draw.randrange(200), files
        ).id
        reply = history.messages.start_reply(chat, parent, "m")
        history.messages.write_reply(reply.id, "word " * draw.randrange(500), "", state=State.WHOLE)
        parent = reply.id
    history.chats.pin(chat, pinned=number % 5 == 0)
    history.chats.archive(chat, archived=number % 7 == 0)


def _content(history: History) -> Content:
    chats = [chat for archived in (False, True) for chat in history.chats.listed(archived=archived)]
    return {chat.id: chat for chat in chats}, {
        one.id: one for chat in chats for one in history.messages.in_chat(chat.id)
    }


def flipped(folder: Path, draw: random.Random) -> str:
    """Flip bits. Returns which."""
    logged = folder / LOG
    if draw.random() < 0.5:
        (folder / INDEX).unlink(missing_ok=True)
    files = [folder / FILE_NAME] + ([logged] * 3 if logged.exists() else [])
    flips = []
    for _ in range(draw.choice((1, 1, 1, 2, 4, 8))):
        file = draw.choice(files)
        content = bytearray(file.read_bytes())
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        content[place] ^= 1 << bit
        file.write_bytes(content)
        flips.append(f"bit {bit} of byte {place} of {file.name}")
    return ", ".join(flips)


def cut(folder: Path, draw: random.Random) -> str:
    """Cut the file, or the log, which has its index, since one that is cut between frames is sound without it."""
    logged = folder / LOG
    file = draw.choice([folder / FILE_NAME, logged]) if logged.exists() else folder / FILE_NAME
    size = draw.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.name} is cut to {size} bytes"


HARMS: Mapping[str, Harm] = {"flipped bits": flipped, "a cut file": cut}


def opened(source: Sound, folder: Path) -> Outcome:
    """Open a damaged history and compare it with the sound one."""
    try:
        with History(folder) as history:
            found = _content(history)
            history.search.find("question")
            history.messages.add_user_message(history.chats.create(ChatSettings()).id, None, "and it goes on")
            rescue = history.rescue
            is_kept = rescue is None or (rescue.aside is not None and rescue.aside.exists())
            after = _content(history)
        with History(folder) as again:
            opens_again = again.rescue is None and _content(again) == after
    except Exception as problem:  # noqa: BLE001  # whatever it is, it is counted
        traceback.print_exception(problem)
        return Outcome(opens=False)
    missing, changed = _differences(source.content, found)
    untold = _untold(rescue, missing, changed) + ("" if is_kept else "the damaged file is not kept")
    num_missing, num_changed = (sum(len(ids) for ids in one.values()) for one in (missing, changed))
    total = len(source.content[0]) + len(source.content[1])
    return Outcome(True, total, num_missing, num_changed, untold, rescue is not None, opens_again)


def _untold(rescue: Rescue | None, missing: Mapping[str, set[int]], changed: Mapping[str, set[int]]) -> str:
    """Of a part of a file that is told to be lost nobody knows what it had."""
    if rescue is not None and rescue.gaps:
        return ""
    lost = rescue.lost if rescue else {}
    damaged = rescue.changed if rescue else {}
    other = rescue.unreadable if rescue else 0
    return "".join(
        f"{len(missing[table])} {table} missing and {lost.get(table, 0)} told, "
        f"{len(changed[table])} changed and {damaged.get(table, 0)} told; "
        for table in missing
        if len(missing[table]) > lost.get(table, 0) + other or len(changed[table]) > damaged.get(table, 0)
    )


def _differences(before: Content, after: Content) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Ids that are missing, and ids that are changed. A chat that was made for lost messages is missing."""
    missing: dict[str, set[int]] = {"chats": set(), "messages": set()}
    changed: dict[str, set[int]] = {"chats": set(), "messages": set()}
    for number, chat in before[0].items():
        other = after[0].get(number)
        if other is None or (other.title == RESCUED_TITLE and chat.title != RESCUED_TITLE):
            missing["chats"].add(number)
        elif _of_itself(chat) != _of_itself(other):
            changed["chats"].add(number)
    for number, message in before[1].items():
        found = after[1].get(number)
        if found is None:
            missing["messages"].add(number)
        elif found != message and not (found.parent != message.parent and message.parent in missing["messages"]):
            changed["messages"].add(number)
    return missing, changed


def _of_itself(chat: Chat) -> tuple[object, ...]:
    """A chat without what follows from its messages."""
    return chat.title, chat.is_title_given, chat.settings, chat.trim, chat.is_pinned, chat.is_archived, chat.created


@contextmanager
def case(source: Sound, place: Path, harm: Harm, number: int) -> Iterator[tuple[str, Outcome]]:
    """Damage a copy of `source` in the folder `place`. Gives what was damaged, and what became of it."""
    folder, draw = place / f"case-{number}", random.Random(number)
    shutil.copytree(source.folder, folder)
    done = harm(folder, draw)
    try:
        yield done, opened(source, folder)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--cuts", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ingle-history-") as name:
        sources = [sound(Path(name) / str(shape), shape) for shape in SHAPES]
        for (kind, harm), count in zip(HARMS.items(), (given.flips, given.cuts), strict=True):
            outcomes = []
            for number in range(count):
                with case(sources[number % len(sources)], Path(name), harm, number) as (done, outcome):
                    outcomes.append(outcome)
                    if outcome.untold or not outcome.opens or not outcome.opens_again:
                        print(f"case {number}: {outcome.untold or outcome}: {done}")
            _report(kind, outcomes)


def _report(kind: str, outcomes: Sequence[Outcome]) -> None:
    print(
        f"{len(outcomes)} histories with {kind}: {sum(one.opens for one in outcomes)} open, "
        f"{sum(one.opens_again for one in outcomes)} stay so, {sum(one.is_mended for one in outcomes)} were mended; "
        f"of {sum(one.total for one in outcomes):,} chats and messages {sum(one.missing for one in outcomes):,} are "
        f"missing and {sum(one.changed for one in outcomes):,} changed; "
        f"{sum(bool(one.untold) for one in outcomes)} did not tell of all that they had lost"
    )


if __name__ == "__main__":
    main()
