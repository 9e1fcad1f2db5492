"""Figures in words."""

import pytest

from engine.request import TokenSources
from tests.tui.scripted_client import USAGE
from tui import figures
from tui.types import ContextBudget, PromptProgress, Usage


@pytest.mark.parametrize(
    ("count", "words"),
    [(None, ""), (0, "0 B"), (999, "999 B"), (98_400_000, "98.4 MB"), (144_811_456, "145 MB"), (999_600_000, "1.0 GB")],
)
def test_sizes(count: int | None, words: str) -> None:
    assert figures.size(count) == words


@pytest.mark.parametrize(
    ("value", "words"), [(0.0023, "2 ms"), (0.41, "0.41 s"), (9.999, "10.00 s"), (12.34, "12.3 s"), (205, "3:25")]
)
def test_times(value: float, words: str) -> None:
    assert figures.seconds(value) == words


@pytest.mark.parametrize(
    ("count", "words"), [(812, "812"), (3_740, "3.7k"), (9_960, "10k"), (131_072, "131k"), (-1500, "-1.5k")]
)
def test_short_counts(count: int, words: str) -> None:
    assert figures.short_count(count) == words


def test_what_a_turn_cost() -> None:
    assert figures.prompt_cost(USAGE) == "1,204 reused (1,188 device, 16 disk), 31 computed"
    assert figures.reply_cost(USAGE) == "first token 0.41 s (queue 2 ms, prompt 0.41 s), 212 tokens at 45.0 tok/s"
    stopped = figures.reply_cost(Usage(TokenSources(computed=12), 0, 0.002, 3.2, 0))
    assert stopped == "no token in 3.20 s (queue 2 ms, prompt 3.20 s)"
    assert figures.prompt_cost(Usage(TokenSources(computed=12), 1, 0, 0, 0)) == "0 reused, 12 computed"


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        (
            Usage(TokenSources(computed=10), 21, 0, 0.5, 2, is_detailed=False),
            "10 prompt tokens · first token 0.50 s, 21 tokens at 10.0 tok/s",
        ),
        (
            Usage(TokenSources(device=4, computed=6), 21, 0, 0.5, 0, is_detailed=False),
            "10 prompt tokens, 4 of them reused · first token 0.50 s, 21 tokens",
        ),
        (Usage(TokenSources(), 0, 0, 0.5, 2, is_detailed=False), "first token 0.50 s"),
    ],
)
def test_what_nobody_told_of_a_cost_is_not_said(usage: Usage, words: str) -> None:
    assert figures.cost(usage) == words


def test_a_budget_says_what_is_free_or_too_many() -> None:
    assert figures.budget(ContextBudget(8192, 120, 1100, 1024)).endswith("free 5.9k")
    assert figures.budget(ContextBudget(2048, 120, 1100, 1024)).endswith("196 too many")
    assert figures.budget(ContextBudget(None, 120, 12_000, 1024)) == "12k: system 120, history 12k"


@pytest.mark.parametrize(
    ("value", "words"), [(0.2, "0 s left"), (40.4, "40 s left"), (720, "12 min left"), (10_000, "3 h left")]
)
def test_time_that_is_left(value: float, words: str) -> None:
    assert figures.time_left(value) == words


def test_progress_of_a_prompt() -> None:
    words = figures.prompt_progress(PromptProgress(2048, 9000, 512))
    assert words == "reading the prompt: 2,048 of 9,000 tokens, 512 of them reused"
