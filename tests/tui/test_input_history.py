"""Tests for the inputs that the arrow keys recall."""

from tui.input_history import InputHistory


def filled(*inputs: str) -> InputHistory:
    history = InputHistory()
    for text in inputs:
        history.append(text)
    history.set_aside()
    return history


def test_inputs_are_recalled_from_the_newest_on() -> None:
    history = filled("one", "two")
    assert history.recall(-1, "") == "two"
    assert history.shows("two")
    assert history.recall(-1, "two") == "one"
    assert history.recall(-1, "one") is None
    assert history.recall(1, "one") == "two"
    assert history.recall(1, "two") == ""
    assert history.recall(1, "") is None


def test_changed_inputs_are_kept_until_text_is_sent() -> None:
    history = filled("one", "two")
    assert history.recall(-1, "typed") == "two"
    assert history.draft("two") == "typed"
    assert history.recall(-1, "two!") == "one"
    assert history.unsent == ["typed", "two!"]
    assert history.recall(1, "one") == "two!"
    history.set_aside()
    assert history.entries == ["one", "two", "typed"]


def test_earlier_runs_come_before_the_inputs_of_this_one() -> None:
    history = filled("mine")
    assert history.recall(-1, "typed") == "mine"
    history.remember(["newer", "older"])
    assert history.recall(-1, "mine") == "newer"
    assert history.draft("newer") == "typed"


def test_inputs_of_a_private_chat_are_forgotten() -> None:
    history = filled("one")
    history.change_chat(is_private=True)
    history.append("secret")
    assert history.entries == ["one", "secret"]
    history.change_chat(is_private=False)
    assert history.entries == ["one"]
