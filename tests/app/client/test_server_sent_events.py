"""Parsing of server-sent events, from bytes in parts of any size."""

import pytest

from app.client.server_sent_events import EventReader

STREAM = b': a comment\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": "\xc2\x85"}\n\ndata: [DONE]\n\ndata: late\n\n'


@pytest.mark.parametrize("size", [1, 3, 10, len(STREAM)])
def test_events_are_read_in_parts_of_any_size(size: int) -> None:
    reader, found = EventReader(), []
    for start in range(0, len(STREAM), size):
        found += reader.feed(STREAM[start : start + size])
        if reader.ended:
            break
    assert found == [b'{"a": 1}', b'{"b": "\xc2\x85"}']
    assert reader.ended


def test_incomplete_event_is_kept_for_later() -> None:
    reader = EventReader()
    assert reader.feed(b"data: half") == []
    assert not reader.ended
    assert reader.feed(b" and half\n") == [b"half and half"]
