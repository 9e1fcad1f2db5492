"""Damage chat histories and check that they open: `python -m tests.torture.damaged_histories --flips 1000 --cuts 100`.

Each case copies an intact history, flips 1 to 8 bits anywhere in its file or its log, or truncates one of the two, and
opens the copy. Then it compares every chat and message with the intact history. The report counts histories that do not
open, chats and messages that are missing or changed, and histories whose notices do not cover all of these losses. The
number of a case is its random seed, so that the case can be run again.
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
TURNS = 10  # number of turns in each chat
SHAPES = ((20, 0), (19, 1), (0, 4))  # (number of chats in the file, number of chats only in the log)

Damage = Callable[[Path, random.Random], str]
Content = tuple[dict[int, Chat], dict[int, StoredMessage]]


@dataclass(frozen=True, slots=True)
class IntactHistory:
    """A folder with an intact history, and its chats and messages."""

    folder: Path
    content: Content


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of opening one damaged history."""

    opens: bool
    total: int = 0  # number of chats and messages
    missing: int = 0
    changed: int = 0
    unreported: str = ""  # description of unreported losses and changes
    is_repaired: bool = False
    opens_again: bool = True  # whether the history opens again, unchanged and without another repair


def intact_history(folder: Path, shape: tuple[int, int]) -> IntactHistory:
    """Create a history in `folder`. `shape` is (number of chats in the file, number of chats only in the log)."""
    work, draw, (in_file, in_log) = folder / "work", random.Random(1), shape
    with History(work) as history, patch.object(Database, "checkpoint"):
        history._database._opened.connection.execute("PRAGMA synchronous = OFF")
        for number in range(in_file):
            _add_chat(history, draw, number)
    with History(work) as history, patch.object(Database, "checkpoint"):
        history._database._opened.connection.execute("PRAGMA synchronous = OFF")
        history._database._opened.connection.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
        for number in range(in_file, in_file + in_log):
            _add_chat(history, draw, number)
        content = _content(history)
        files = [path for path in work.glob(f"{FILE_NAME}*") if path.stat().st_size]
        (folder / "sound").mkdir()
        for path in files:
            shutil.copy(path, folder / "sound")
    return IntactHistory(folder / "sound", content)


def _add_chat(history: History, draw: random.Random, number: int) -> None:
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


def flip_bits(folder: Path, draw: random.Random) -> str:
    """Flip 1 to 8 bits of the file and the log, and return a description of them."""
    log = folder / LOG
    if draw.random() < 0.5:
        (folder / INDEX).unlink(missing_ok=True)
    files = [folder / FILE_NAME] + ([log] * 3 if log.exists() else [])
    flips = []
    for _ in range(draw.choice((1, 1, 1, 2, 4, 8))):
        file = draw.choice(files)
        content = bytearray(file.read_bytes())
        index, bit = draw.randrange(len(content)), draw.randrange(8)
        content[index] ^= 1 << bit
        file.write_bytes(content)
        flips.append(f"bit {bit} of byte {index} of {file.name}")
    return ", ".join(flips)


def cut_file(folder: Path, draw: random.Random) -> str:
    """Truncate the file or the log, and return a description of the damage.

    The index of the log stays, because without it a log that is cut between two frames looks like a shorter intact one.
    """
    log = folder / LOG
    file = draw.choice([folder / FILE_NAME, log]) if log.exists() else folder / FILE_NAME
    size = draw.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.name} is cut to {size} bytes"


DAMAGES: Mapping[str, Damage] = {"flipped bits": flip_bits, "a cut file": cut_file}


def open_and_compare(source: IntactHistory, folder: Path) -> Outcome:
    """Open a damaged history and compare it with the intact one."""
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
    except Exception as problem:  # noqa: BLE001 # any failure counts
        traceback.print_exception(problem)
        return Outcome(opens=False)
    missing, changed = _differences(source.content, found)
    unreported = _unreported(rescue, missing, changed) + ("" if is_kept else "the damaged file is not kept")
    num_missing, num_changed = (sum(len(ids) for ids in one.values()) for one in (missing, changed))
    total = len(source.content[0]) + len(source.content[1])
    return Outcome(True, total, num_missing, num_changed, unreported, rescue is not None, opens_again)


def _unreported(rescue: Rescue | None, missing: Mapping[str, set[int]], changed: Mapping[str, set[int]]) -> str:
    """Describe the losses and changes that exceed the reported numbers. Returns "" if there are none.

    If a part of the file is reported as lost, its content is unknown, so every loss counts as reported.
    """
    if rescue is not None and rescue.gaps:
        return ""
    lost = rescue.lost if rescue else {}
    damaged = rescue.changed if rescue else {}
    other = rescue.unreadable if rescue else 0
    return "".join(
        f"{len(missing[table])} {table} missing and {lost.get(table, 0)} reported, "
        f"{len(changed[table])} changed and {damaged.get(table, 0)} reported; "
        for table in missing
        if len(missing[table]) > lost.get(table, 0) + other or len(changed[table]) > damaged.get(table, 0)
    )


def _differences(before: Content, after: Content) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Return the ids of missing rows and the ids of changed rows, each by table.

    A chat counts as missing if the repair had to create a new one for its messages.
    """
    missing: dict[str, set[int]] = {"chats": set(), "messages": set()}
    changed: dict[str, set[int]] = {"chats": set(), "messages": set()}
    for number, chat in before[0].items():
        other = after[0].get(number)
        if other is None or (other.title == RESCUED_TITLE and chat.title != RESCUED_TITLE):
            missing["chats"].add(number)
        elif _own_fields(chat) != _own_fields(other):
            changed["chats"].add(number)
    for number, message in before[1].items():
        found = after[1].get(number)
        if found is None:
            missing["messages"].add(number)
        elif found != message and not (found.parent != message.parent and message.parent in missing["messages"]):
            changed["messages"].add(number)
    return missing, changed


def _own_fields(chat: Chat) -> tuple[object, ...]:
    """Return the fields of a chat that do not depend on its messages."""
    return chat.title, chat.is_title_given, chat.settings, chat.trim, chat.is_pinned, chat.is_archived, chat.created


@contextmanager
def case(source: IntactHistory, parent: Path, damage: Damage, number: int) -> Iterator[tuple[str, Outcome]]:
    """Damage a copy of `source` below `parent`. Yields a description of the damage, and the outcome."""
    folder, draw = parent / f"case-{number}", random.Random(number)
    shutil.copytree(source.folder, folder)
    description = damage(folder, draw)
    try:
        yield description, open_and_compare(source, folder)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--cuts", type=int, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ingle-history-") as name:
        sources = [intact_history(Path(name) / str(shape), shape) for shape in SHAPES]
        for (kind, damage), count in zip(DAMAGES.items(), (arguments.flips, arguments.cuts), strict=True):
            outcomes = []
            for number in range(count):
                with case(sources[number % len(sources)], Path(name), damage, number) as (description, outcome):
                    outcomes.append(outcome)
                    if outcome.unreported or not outcome.opens or not outcome.opens_again:
                        print(f"case {number}: {outcome.unreported or outcome}: {description}")
            _report(kind, outcomes)


def _report(kind: str, outcomes: Sequence[Outcome]) -> None:
    print(
        f"{len(outcomes)} histories with {kind}: {sum(one.opens for one in outcomes)} open, "
        f"{sum(one.opens_again for one in outcomes)} open again unchanged, "
        f"{sum(one.is_repaired for one in outcomes)} were repaired; "
        f"of {sum(one.total for one in outcomes):,} chats and messages {sum(one.missing for one in outcomes):,} are "
        f"missing and {sum(one.changed for one in outcomes):,} changed; "
        f"{sum(bool(one.unreported) for one in outcomes)} did not report all losses"
    )


if __name__ == "__main__":
    main()
