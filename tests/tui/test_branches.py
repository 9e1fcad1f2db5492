"""Tests for the tree of a chat's messages."""

from tests.tui.scripted_client import NOON
from tui.branches import Branches
from tui.types import Message, MessageId, Role


def message(name: str, parent: str | None) -> Message:
    return Message(MessageId(name), None if parent is None else MessageId(parent), Role.USER, name, NOON)


def branches() -> Branches:
    """Return the tree a - b - c, with b2 - d - e as a sibling of b, and a2 as a sibling of a."""
    return Branches(
        message(*one)
        for one in [("a", None), ("b", "a"), ("c", "b"), ("b2", "a"), ("d", "b2"), ("a2", None), ("e", "d")]
    )


def test_path_runs_from_first_message_to_leaf() -> None:
    assert [one.id for one in branches().path(MessageId("e"))] == ["a", "b2", "d", "e"]
    assert branches().path(None) == []


def test_path_ends_where_a_message_is_missing() -> None:
    assert branches().path(MessageId("missing")) == []
    orphans = Branches([message("b", "missing"), message("c", "b")])
    assert [one.id for one in orphans.path(MessageId("c"))] == ["b", "c"]


def test_siblings_are_in_order_of_creation() -> None:
    tree = branches()
    assert tree.siblings(MessageId("b2")) == ("b", "b2")
    assert tree.siblings(MessageId("a")) == ("a", "a2")
    assert tree.siblings(MessageId("d")) == ("d",)


def test_neighbor_leaf_is_the_newest_of_its_branch() -> None:
    tree = branches()
    assert tree.neighbor_leaf(MessageId("b"), 1) == "e"
    assert tree.neighbor_leaf(MessageId("b2"), -1) == "c"
    assert tree.neighbor_leaf(MessageId("b2"), 1) is None
    assert tree.neighbor_leaf(MessageId("b"), -1) is None


def test_replaced_message_keeps_its_position() -> None:
    tree = branches()
    tree.put(Message(MessageId("b"), MessageId("a"), Role.USER, "other", NOON))
    assert tree[MessageId("b")].text == "other"
    assert tree.siblings(MessageId("b")) == ("b", "b2")
    assert len(tree) == 7
