"""Tests that kill chats with a shared history during requests and replies.

They run some cases of tests/torture/killed_sharers.py.
"""

import random

import pytest

from tests.torture.killed_sharers import kill_rounds


def test_history_has_all_messages_of_killed_chats(pytestconfig: pytest.Config) -> None:
    count = kill_rounds(2, 2, random.Random(pytestconfig.option.seed))
    assert count.sent >= 2
    assert (count.lost, count.notices) == (set(), [])
