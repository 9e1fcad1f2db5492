"""The tree of a chat's messages."""

from tests.tui.scripted_client import NOON
from tui.branches import Branches
from tui.types import Message, MessageId, Role


def message(name: str, parent: str | None) -> Message:
    return Message(MessageId(name), None if parent is None else MessageId(parent), Role.USER, name, NOON)


def branches() -> Branches:
    """a - b - c, b2 - d - e beside b, and a2 beside a."""
    return Branches(
        message(*one)
        for one in [("a", None), ("b", "a"), ("c", "b"), ("b2", "a"), ("d", "b2"), ("a2", None), ("e", "d")]
    )


def test_a_path_leads_from_the_first_message_to_a_leaf() -> None:
    assert [one.id for one in branches().path(MessageId("e"))] == ["a", "b2", "d", "e"]
    assert branches().path(None) == []


def test_siblings_are_in_the_order_in_which_they_came() -> None:
    tree = branches()
    assert tree.siblings(MessageId("b2")) == ("b", "b2")
    assert tree.siblings(MessageId("a")) == ("a", "a2")
    assert tree.siblings(MessageId("d")) == ("d",)


def test_a_step_aside_ends_at_the_newest_leaf_there() -> None:
    tree = branches()
    assert tree.neighbor_leaf(MessageId("b"), 1) == "e"
    assert tree.neighbor_leaf(MessageId("b2"), -1) == "c"
    assert tree.neighbor_leaf(MessageId("b2"), 1) is None
    assert tree.neighbor_leaf(MessageId("b"), -1) is None


def test_a_message_told_anew_stays_where_it_is() -> None:
    tree = branches()
    tree.put(Message(MessageId("b"), MessageId("a"), Role.USER, "other", NOON))
    assert tree[MessageId("b")].text == "other"
    assert tree.siblings(MessageId("b")) == ("b", "b2")
    assert len(tree) == 7
