"""Cache of the token ids of generated replies, for later prompts that contain the text of a reply.

Encoding the text of a reply again may give different ids, and then the KV cache has no matching prefix. The ids are
stored under digests of the text before them. Slow work runs on a background thread, never on the caller's.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from app.generation.reply_token_file import MAX_SIZE, MAX_SPANS_PER_PART, Changes, ReplyTokenFile, TokenSpan

_REWRITE_USE_SECONDS = 3600  # seconds before the file records another use of the same span
_ABSENT_SECONDS = 300  # seconds before the file is read again for a missing key, which another process may have added
_MAX_ABSENT_KEYS = 1 << 16


class ReplyTokenCache:
    """Keeps all spans of generated ids in memory, and also in a file if they may be stored.

    The least recently used spans are dropped first. Thread-safe.
    """

    def __init__(self, folder: Path | None = None, *, max_size: int = MAX_SIZE) -> None:
        """Create a cache.

        `folder` contains the file, which may not exist yet; None: memory only. `max_size` is in ids, as in
        reply_token_file.
        """
        self._file = None if folder is None else ReplyTokenFile(folder, max_size=max_size)
        self._max_size = max_size
        self._lock = threading.RLock()  # protects the fields below
        self._spans: OrderedDict[bytes, list[TokenSpan]] = OrderedDict()
        self._size = 0
        # keys without spans in the file, and the time at which the file was read
        self._absent: OrderedDict[bytes, float] = OrderedDict()
        self._changes = Changes()
        self._applying = Changes()
        self._deletions = 0  # number of deletions from the file so far
        self._ended: deque[Callable[[], Iterable[TokenSpan]]] = deque()
        self._wake = threading.Condition()  # protects the fields below; never held for long
        self._has_work = False
        self._is_working = False

    def remember(self, spans: Callable[[], Iterable[TokenSpan]]) -> None:
        """Remember the spans that `spans` returns. `spans` is called on another thread, or before the next lookup."""
        self._ended.append(spans)
        self._work_soon()

    def find(self, part_key: bytes) -> Sequence[TokenSpan]:
        """Return the spans of a text part that are in memory, oldest first."""
        with self._lock:
            if self._ended:
                self._settle()
            return tuple(self._spans.get(part_key, ()))

    def find_stored(self, part_key: bytes) -> Sequence[TokenSpan]:
        """Return the spans of a text part, including those in the file. Reads from disk."""
        if self._file is None or time.monotonic() - self._absent.get(part_key, -_ABSENT_SECONDS) < _ABSENT_SECONDS:
            return ()
        deletions_before, seen = self._deletions, time.monotonic()
        stored = self._file.find(part_key)
        with self._lock:
            if not stored:
                self._absent[part_key] = seen
                if len(self._absent) > _MAX_ABSENT_KEYS:
                    self._absent.popitem(last=False)
                return ()
            if self._deletions != deletions_before:  # the deletion may concern the spans that were read
                return tuple(self._spans.get(part_key, ()))
            gone, known = self._changes.forgotten | self._applying.forgotten, self._spans.pop(part_key, [])
            self._size -= sum(one.size for one in known)
            for one in (*(one for one in stored if one.prefix_key not in gone), *known):
                self._add(one)
            return tuple(self._spans.get(part_key, ()))

    def use(self, span: TokenSpan) -> None:
        """Mark `span` as used."""
        with self._lock:
            if span.part_key in self._spans:
                self._spans.move_to_end(span.part_key)
            now = int(time.time())
            if not span.stored or now - span.used < _REWRITE_USE_SECONDS:
                return
            span.used = now
            self._changes.written.append(span)
        self._work_soon()

    def forget(self, prefix_keys: Collection[bytes]) -> None:
        """Forget the spans after any of `prefix_keys`, also on disk."""
        with self._lock:
            self._settle()
            for part_key, several in [*self._spans.items()]:
                kept = [one for one in several if one.prefix_key not in prefix_keys]
                self._size -= sum(one.size for one in several) - sum(one.size for one in kept)
                if kept:
                    self._spans[part_key] = kept
                else:
                    del self._spans[part_key]
            self._changes.written = [one for one in self._changes.written if one.prefix_key not in prefix_keys]
            self._changes.forgotten.update(prefix_keys)
        self._work_soon()

    def flush(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` until everything is written, and return whether it is."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._is_working, seconds)

    def close(self) -> None:
        """Wait until everything is written, and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()

    def _settle(self) -> None:
        """Add the spans that `remember` received since the last call. The caller must hold the lock."""
        while self._ended:
            for one in self._ended.popleft()():
                one.used = int(time.time())
                self._add(one)
                if one.stored and self._file is not None:
                    self._changes.written.append(one)

    def _add(self, added: TokenSpan) -> None:
        """Add a span as the newest one of its text part. It replaces spans that it continues."""
        several = self._spans.setdefault(added.part_key, [])
        self._spans.move_to_end(added.part_key)
        self._size += added.size
        for one in [one for one in several if added.continues(one)]:
            several.remove(one)
            self._size -= one.size
            if one.stored and one.ids != added.ids:
                self._changes.replaced.append(one.key)
        several.append(added)
        if len(several) > MAX_SPANS_PER_PART:
            self._size -= several.pop(0).size
        while self._size > self._max_size:
            _, oldest = self._spans.popitem(last=False)
            self._size -= sum(one.size for one in oldest)

    def _work_soon(self) -> None:
        """Wake the background thread, or start one. It ends when there is no work left."""
        with self._wake:
            self._has_work = True
            if not self._is_working:
                with suppress(RuntimeError):  # if the process has too many threads, the next call does this work
                    threading.Thread(target=self._work, name="reply tokens").start()
                    self._is_working = True

    def _work(self) -> None:
        while True:
            with self._wake:
                if not self._has_work:
                    self._is_working = False
                    self._wake.notify_all()
                    return
                self._has_work = False
            try:
                self._write()
            except BaseException:
                with self._wake:
                    self._is_working = False
                raise

    def _write(self) -> None:
        with self._lock:
            self._settle()
            self._applying, self._changes = self._changes, Changes()
        if self._file is not None and self._applying:
            self._file.apply(self._applying)
        with self._lock:
            self._deletions += bool(self._applying.forgotten)
            self._applying = Changes()
