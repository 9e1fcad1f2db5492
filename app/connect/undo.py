"""Write settings of clients so that each of them can be undone, even if other parts of the files change.

A record per client has, for each value: its path, the text that was there before, and the values that were written. It
is written before the files. Undoing sets the values back one by one, and leaves a value that has changed since. A file
without other changes gets its earlier bytes again, from a copy.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from app.connect.connection import Connection, Target
from app.connect.documents import (
    ABSENT,
    Document,
    Format,
    InvalidFile,
    InvalidText,
    KeyPath,
    Unwritable,
    nested,
)
from app.connect.settings_file import check_private, opened, read_file, remove_file, write_file
from app.errors import AppError
from app.whole_file import write_whole
from engine.private_folder import private_folder

_PRIVATE = 0o600
_COPIES = 5  # that are kept of each file
_DIGEST = 32  # characters of a digest


class Change(msgspec.Struct):
    """A value that was written."""

    path: KeyPath
    before: str | None  # text of the value before; None: it was absent
    depth: int  # leading steps of the path that existed before
    written: list[Any]  # the values that were written, the latest first


class FileRecord(msgspec.Struct):
    """A file that was written."""

    path: str
    format: Format
    before: str | None  # digest before; None: the file did not exist
    after: list[str]  # digests after, the latest first
    changes: list[Change]
    frame: list[KeyPath] = []  # values of a new file that stay with what others add to it
    refreshed: list[str] = []  # members of the values that the client itself changes

    def wrote(self, change: Change, value: object) -> bool:
        """Whether a value is one that was written."""
        return self._lasting(value) in [self._lasting(one) for one in change.written]

    def _lasting(self, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {name: member for name, member in value.items() if name not in self.refreshed}


class Record(msgspec.Struct):
    """The files that were written for a client, and the connection that they name, without its key."""

    files: list[FileRecord] = msgspec.field(default_factory=list)
    connection: Connection | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A file that is written: its content before and after. None: the file does not exist."""

    path: Path
    before: bytes | None
    after: bytes | None
    kept: Sequence[str] = field(default=())  # values that are left, because they have changed since


class Undo:
    """The records of all clients, in a private folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def connect(
        self, client: str, targets: Sequence[Target], connection: Connection | None = None, *, dry: bool = False
    ) -> Sequence[Written]:
        """Write settings of a client. Values of an earlier call are undone first. `dry`: only return what would change.

        `connection`: the connection that the settings name. Raises InvalidFile before anything is written, and OSError.
        """
        record = self._read(client)
        earlier = {file.path: file for file in record.files}
        planned = [self._plan(client, target, earlier.get(str(target.path))) for target in targets]
        files = {**earlier, **{file.path: file for file, _, _ in planned}}
        if not dry:
            for _, written, base in planned:
                self._keep_copy(client, written.path, base)
            # the process may end before all files are written: until then, they may have the values of an earlier call
            unfinished = [_with_earlier(file, earlier.get(file.path)) for file in files.values()]
            known = None if connection is None else replace(connection, key=None)
            self._write(client, Record(unfinished, known))
            for _, written, _ in planned:
                _apply(written)
            self._write(client, Record(list(files.values()), known))
        return [written for _, written, _ in planned]

    def disconnect(self, client: str, *, dry: bool = False) -> Sequence[Written]:
        """Undo all settings that were written for a client, and remove its record. Raises OSError and InvalidFile."""
        undone = [self._undone(client, file) for file in reversed(self._read(client).files)]
        if not dry:
            for written in undone:
                _apply(written)
            self._file(client).unlink(missing_ok=True)
        return undone

    def is_set_up(self, client: str) -> bool | None:
        """Whether all values of a client are as they were written; None: none was written."""
        files = self._read(client).files
        return all(_is_unchanged(file) for file in files) if files else None

    def connection(self, client: str) -> Connection | None:
        """Return the connection that the settings of a client name, without its key; None: none was written."""
        return self._read(client).connection

    def _plan(
        self, client: str, target: Target, earlier: FileRecord | None
    ) -> tuple[FileRecord, Written, bytes | None]:
        """Return the record of a file, what is written to it, and its content without earlier settings."""
        current = read_file(target.path)
        if target.is_private:
            check_private(target.path)
        base = current if earlier is None else self._undone(client, earlier).after
        document = opened(target.path, target.format, base)
        changes, frame = [], target.frame if base is None else {}
        for path, value in frame.items():
            document.put(path, value)
        for path, value in target.values.items():
            change = Change(path, None, document.depth(path), [value])
            if document.has(path) and (target.format != "text" or base is not None):
                change.before = document.source(path)
            with _refusing(target.path, path, value):
                document.put(path, value)
            changes.append(change)
        after = document.text.encode()
        record = FileRecord(
            str(target.path),
            target.format,
            _digest(base),
            [_digest_of(after)],
            changes,
            list(frame),
            list(target.refreshed),
        )
        return record, Written(target.path, current, after), base

    def _undone(self, client: str, file: FileRecord) -> Written:
        """Return a file without the settings of its record."""
        path = Path(file.path)
        current = read_file(path)
        digest = _digest(current)
        if current is None or digest == file.before:
            return Written(path, current, current)
        if digest in file.after:
            if file.before is None:
                return Written(path, current, None)
            with suppress(OSError):
                copy = self._copy(client, path, file.before).read_bytes()
                if _digest(copy) == file.before:
                    return Written(path, current, copy)
        return _undone_by_key(path, current, file)

    def _keep_copy(self, client: str, path: Path, content: bytes | None) -> None:
        """Write a copy of a file, and remove the oldest copies."""
        if content is None:
            return
        copy = self._copy(client, path, _digest_of(content))
        private_folder(copy.parent)
        copy.unlink(missing_ok=True)
        write_whole(copy, content, _PRIVATE)
        copies = sorted(copy.parent.glob("*"), key=lambda one: one.stat().st_mtime_ns)
        for old in copies[:-_COPIES]:
            old.unlink(missing_ok=True)

    def _copy(self, client: str, path: Path, digest: str) -> Path:
        return self._folder / "copies" / client / _digest_of(str(path).encode()) / digest

    def _file(self, client: str) -> Path:
        return self._folder / f"{client}.json"

    def _read(self, client: str) -> Record:
        file = self._file(client)
        try:
            return msgspec.json.decode(file.read_bytes(), type=Record)
        except FileNotFoundError:
            return Record()
        except (OSError, msgspec.MsgspecError) as problem:
            raise InvalidFile(f"{file}: {problem}", f"Remove it to forget the settings of {client}.") from None

    def _write(self, client: str, record: Record) -> None:
        private_folder(self._folder)
        content = msgspec.json.format(msgspec.json.encode(record), indent=2)
        write_whole(self._file(client), content, _PRIVATE)


def _with_earlier(record: FileRecord, earlier: FileRecord | None) -> FileRecord:
    """Return a record with the values that an earlier call wrote as well."""
    if earlier is None or earlier is record:
        return record
    digests = earlier.after if record.before == earlier.before else []
    written = {change.path: change.written for change in earlier.changes}
    changes = [
        msgspec.structs.replace(change, written=[*change.written, *written.pop(change.path, [])])
        for change in record.changes
    ]
    others = [change for change in earlier.changes if change.path in written]
    return msgspec.structs.replace(record, after=[*record.after, *digests], changes=[*changes, *others])


def _undone_by_key(path: Path, current: bytes, file: FileRecord) -> Written:
    document = opened(path, file.format, current)
    kept = []
    for change in reversed(file.changes):
        value = document.get(change.path)
        if value is ABSENT or (change.before is not None and document.source(change.path) == change.before):
            continue
        try:
            if file.wrote(change, value):
                _undo(document, change)
            else:
                kept.append(shown(change.path))
        except (Unwritable, InvalidText):
            return Written(path, current, current, [shown(one.path) for one in file.changes])
    after = document.text.encode()
    if file.before is None:
        for frame in file.frame:
            if document.has(frame):
                document.remove(frame)
        if not document.text.strip("\ufeff \t\r\n") or document.get(()) in ({}, []):
            return Written(path, current, None, kept)
    return Written(path, current, after, kept)


def _undo(document: Document, change: Change) -> None:
    """Set a value back, and remove the objects and lists that were created for it and are empty now."""
    if change.before is not None:
        document.put_source(change.path, change.before)
        return
    document.remove(change.path)
    for length in range(len(change.path) - 1, change.depth, -1):
        if document.get(change.path[:length]) not in ({}, []):
            break
        document.remove(change.path[:length])


def _is_unchanged(file: FileRecord) -> bool:
    try:
        current = read_file(Path(file.path))
        if _digest(current) in file.after:
            return True
        document = opened(Path(file.path), file.format, current)
    except AppError:
        return False
    return all(file.wrote(change, document.get(change.path)) for change in file.changes)


def _apply(written: Written) -> None:
    if written.after == written.before:
        return
    if written.after is None:
        remove_file(written.path)
    else:
        write_file(written.path, written.after)


@contextmanager
def _refusing(path: Path, key: KeyPath, value: object) -> Iterator[None]:
    """Convert errors of an edit to InvalidFile, which says what to write by hand."""
    try:
        yield
    except (Unwritable, InvalidText) as problem:
        by_hand = json.dumps(nested(value, key), ensure_ascii=False)
        raise InvalidFile(f"{path}: {shown(key)} cannot be set: {problem}", f"Add it by hand: {by_hand}") from None


def shown(path: KeyPath) -> str:
    """Return a path for messages, such as env.ANTHROPIC_MODEL."""
    return ".".join(map(str, path)).replace(".[", "[") or "the whole file"


def _digest(content: bytes | None) -> str | None:
    return None if content is None else _digest_of(content)


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST]
