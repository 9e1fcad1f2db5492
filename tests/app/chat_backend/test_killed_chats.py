"""Chats that share a history, killed while they ask and reply: a share of what tests/torture/killed_sharers.py does."""

import random

import pytest

from tests.torture.killed_sharers import kill_rounds


def test_history_has_everything_that_killed_chats_had_sent(pytestconfig: pytest.Config) -> None:
    count = kill_rounds(2, 2, random.Random(pytestconfig.option.seed))
    assert count.sent >= 2
    assert (count.lost, count.told) == (set(), [])
