"""Lock files of the replies that are being generated, so that other windows can show them.

The reply of a killed process is never marked, because its lock is released. Each reply has its own file, because
message ids are unique in a history.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from app.history import lock_files

if TYPE_CHECKING:
    from filelock import BaseFileLock

_SUFFIX = ".reply"


class ReplyMarks:
    """The marks in the folder of a history; without a folder, there are none.

    Marks are only hints: if a file cannot be created or read, its reply is not marked.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: dict[int, BaseFileLock] = {}  # by message

    def hold(self, chat: int, message: int) -> None:
        """Mark a reply until `release`, or until this process ends."""
        if self._folder is not None:
            with suppress(OSError):
                self._held[message] = lock_files.hold(self._folder / f"{chat}-{message}{_SUFFIX}")

    def release(self, message: int) -> None:
        if (lock := self._held.pop(message, None)) is not None:
            lock_files.remove(lock)

    def of_others(self) -> Mapping[int, list[int]]:
        """Return the replies that other processes are generating, as messages by chat."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        with suppress(OSError):
            for path, chat, message in self._marks():
                if message not in self._held and lock_files.is_held(path):
                    found[chat].append(message)
        return found

    def _marks(self) -> Iterator[tuple[Path, int, int]]:
        for path in () if self._folder is None else self._folder.glob(f"*{_SUFFIX}"):
            chat, _, message = path.stem.partition("-")
            if chat.isdecimal() and message.isdecimal():
                yield path, int(chat), int(message)
