"""The cache of generated ids: lookups, limits, and persistence."""

import logging
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterable
from pathlib import Path

import pytest

from app.generation.reply_token_cache import ReplyTokenCache
from app.generation.reply_token_file import FILE_NAME, OVERHEAD, ReplyTokenFile, TokenSpan
from tests.support.processes import Started

PLACE = b"p" * 32
SECONDS = 60.0  # timeout, so that a hang fails the test


def generated(number: int, *, part_key: bytes = PLACE, stored: bool = True) -> TokenSpan:
    return TokenSpan(part_key, number.to_bytes(32, "little"), number, array("I", range(number, number + 10)), stored)


def remember(reply_tokens: ReplyTokenCache, *several: TokenSpan) -> None:
    reply_tokens.remember(lambda: several)


def numbers(several: Iterable[TokenSpan]) -> list[int]:
    return [one.ids[0] for one in several]


def test_remembered_spans_are_found_at_once() -> None:
    reply_tokens = ReplyTokenCache()
    for number in range(100):
        remember(reply_tokens, generated(number))
        assert numbers(reply_tokens.find(PLACE)) == list(range(number + 1))
    assert reply_tokens.find(b"elsewhere") == ()


def test_repeated_span_becomes_the_newest() -> None:
    reply_tokens = ReplyTokenCache()
    remember(reply_tokens, generated(1), generated(2), generated(1))
    assert numbers(reply_tokens.find(PLACE)) == [2, 1]


def test_longer_span_replaces_its_prefix(tmp_path: Path) -> None:
    reply_tokens = ReplyTokenCache(tmp_path)
    whole = generated(1)
    for count in (2, 5, 5, 10):
        remember(reply_tokens, TokenSpan(PLACE, whole.prefix_key, 1, whole.ids[:count], stored=True))
        assert reply_tokens.flush(SECONDS)
    remember(reply_tokens, TokenSpan(PLACE, whole.prefix_key, 1, array("I", [7, 8]), stored=True))
    for known in (reply_tokens, ReplyTokenCache(tmp_path)):
        assert known.flush(SECONDS)
        assert [list(one.ids) for one in known.find(PLACE) or known.find_stored(PLACE)] == [[*whole.ids], [7, 8]]
    assert len(ReplyTokenFile(tmp_path).find(PLACE)) == 2


def test_least_recently_used_spans_are_dropped() -> None:
    reply_tokens = ReplyTokenCache(max_size=3 * (10 + OVERHEAD))
    several = [generated(number, part_key=bytes([number])) for number in range(4)]
    remember(reply_tokens, *several[:3])
    assert [len(reply_tokens.find(one.part_key)) for one in several] == [1, 1, 1, 0]
    reply_tokens.use(several[0])
    remember(reply_tokens, several[3])
    assert [len(reply_tokens.find(one.part_key)) for one in several] == [1, 0, 1, 1]


def test_spans_are_found_after_a_restart(tmp_path: Path) -> None:
    reply_tokens = ReplyTokenCache(tmp_path)
    remember(reply_tokens, generated(1), generated(2, stored=False))
    assert reply_tokens.flush(SECONDS)
    assert numbers(reply_tokens.find(PLACE)) == [1, 2]
    again = ReplyTokenCache(tmp_path)
    assert again.find(PLACE) == ()
    assert numbers(again.find_stored(PLACE)) == [1]
    assert numbers(again.find(PLACE)) == [1]
    assert numbers(reply_tokens.find_stored(PLACE)) == [1, 2]


def test_missing_keys_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    find = ReplyTokenFile.find

    def counted(file: ReplyTokenFile, part_key: bytes) -> list[TokenSpan]:
        asked.append(part_key)
        return find(file, part_key)

    monkeypatch.setattr(ReplyTokenFile, "find", counted)
    reply_tokens, writer = ReplyTokenCache(tmp_path), ReplyTokenCache(tmp_path)
    assert reply_tokens.find_stored(PLACE) == reply_tokens.find_stored(PLACE) == ()
    assert asked == [PLACE]
    remember(writer, generated(1))
    assert writer.flush(SECONDS)
    later = time.monotonic() + 301
    monkeypatch.setattr("app.generation.reply_token_cache.time.monotonic", lambda: later)
    assert numbers(reply_tokens.find_stored(PLACE)) == [1]


def test_unstored_spans_create_no_file(tmp_path: Path) -> None:
    reply_tokens = ReplyTokenCache(tmp_path / "folder")
    remember(reply_tokens, generated(1, stored=False))
    assert reply_tokens.flush(SECONDS)
    assert not (tmp_path / "folder").exists()


def test_used_spans_stay_on_disk(tmp_path: Path) -> None:
    room = 3 * (10 + OVERHEAD)
    first = ReplyTokenCache(tmp_path, max_size=room)
    for number in range(3):
        remember(first, generated(number, part_key=bytes([number])))
        assert first.flush(SECONDS)
    later = ReplyTokenCache(tmp_path, max_size=room)
    [oldest] = later.find_stored(bytes([0]))
    oldest.used -= 10_000
    later.use(oldest)
    assert later.flush(SECONDS)
    remember(later, generated(3, part_key=bytes([3])))
    assert later.flush(SECONDS)
    again = ReplyTokenCache(tmp_path)
    assert [len(again.find_stored(bytes([number]))) for number in range(4)] == [1, 0, 1, 1]


def test_forgotten_spans_stay_forgotten(tmp_path: Path) -> None:
    reply_tokens = ReplyTokenCache(tmp_path)
    remember(reply_tokens, generated(1), generated(2))
    assert reply_tokens.flush(SECONDS)
    remember(reply_tokens, generated(3))
    reply_tokens.forget({generated(1).prefix_key, generated(3).prefix_key})
    assert numbers(reply_tokens.find_stored(PLACE)) == [2]
    assert reply_tokens.flush(SECONDS)
    assert numbers(reply_tokens.find_stored(PLACE)) == [2]
    assert numbers(ReplyTokenCache(tmp_path).find_stored(PLACE)) == [2]
    remember(reply_tokens, generated(1))  # the same reply is generated again
    assert reply_tokens.flush(SECONDS)
    assert numbers(ReplyTokenCache(tmp_path).find_stored(PLACE)) == [2, 1]


def test_damaged_file_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"something else" * 1000)
    reply_tokens = ReplyTokenCache(tmp_path)
    assert reply_tokens.find_stored(PLACE) == ()
    remember(reply_tokens, generated(1))
    assert reply_tokens.flush(SECONDS)
    assert numbers(reply_tokens.find(PLACE)) == numbers(ReplyTokenCache(tmp_path).find_stored(PLACE)) == [1]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


CHILD = """
import sys, time
from pathlib import Path
from tests.app.generation.test_reply_token_cache import ReplyTokenCache, generated, remember

reply_tokens = ReplyTokenCache(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    remember(reply_tokens, generated(number))
    assert reply_tokens.flush(60)
    print(number, flush=True)
time.sleep(600)
"""


def child(folder: Path, first: int, end: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CHILD, str(folder), str(first), str(end)]
    return Started(command, stdout=subprocess.PIPE, text=True)


def test_file_survives_a_killed_writer(tmp_path: Path) -> None:
    process = child(tmp_path, 0, 100_000)
    with process:
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(30)]
        process.kill()
    assert process.returncode == -signal.SIGKILL
    found = numbers(ReplyTokenCache(tmp_path).find_stored(PLACE))
    assert set(told) <= set(found)


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    with child(tmp_path, 0, 50) as one, child(tmp_path, 50, 100) as other:
        told = [process.stdout.readline() for process in (one, other) if process.stdout for _ in range(50)]
        one.kill()
        other.kill()
    assert len(told) == 100
    assert all(told)
    assert sorted(numbers(ReplyTokenCache(tmp_path).find_stored(PLACE))) == list(range(100))
