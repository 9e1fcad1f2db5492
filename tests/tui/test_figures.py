"""Tests for formatting numbers as text."""

from dataclasses import replace

import pytest

from engine.request import TokenSources
from tests.tui.scripted_client import USAGE
from tui import figures
from tui.types import Attachment, ContextBudget, Finish, Message, MessageId, Role, Usage


@pytest.mark.parametrize(
    ("count", "words"),
    [(None, ""), (0, "0 B"), (999, "999 B"), (98_400_000, "98.4 MB"), (144_811_456, "145 MB"), (999_600_000, "1.0 GB")],
)
def test_sizes_are_formatted(count: int | None, words: str) -> None:
    assert figures.size(count) == words


@pytest.mark.parametrize(
    ("value", "words"), [(0.0023, "2 ms"), (0.41, "0.41 s"), (9.999, "10.00 s"), (12.34, "12.3 s"), (205, "3 min 25 s")]
)
def test_times_are_formatted(value: float, words: str) -> None:
    assert figures.seconds(value) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [(812, "812"), (3_740, "3.7k"), (9_960, "10k"), (131_072, "131k"), (1_125_000, "1.1M"), (-1500, "-1.5k")],
)
def test_counts_are_shortened(count: int, words: str) -> None:
    assert figures.short_count(count) == words


def test_details_name_the_drafts_and_the_temperature_of_a_retry() -> None:
    reply, prompt = figures.reply_cost(USAGE), figures.prompt_cost(USAGE)
    assert figures.details(USAGE) == [reply, prompt]
    drafted = replace(USAGE, drafted_tokens=480, accepted_tokens=312)
    assert figures.details(drafted) == [reply, "312 of 480 drafted tokens accepted", prompt]
    retried = replace(USAGE, retry_temperature=0.7)
    note = "temperature 0.7 for this retry: at temperature 0 it would repeat the reply"
    assert figures.details(retried) == [reply, prompt, note]


def test_cost_of_a_reply_is_formatted() -> None:
    assert figures.prompt_cost(USAGE) == "1,204 of 1,235 prompt tokens cached (1,188 device, 16 disk)"
    assert figures.reply_cost(USAGE) == "212 tokens · 45.0 tok/s · 0.41 s to first token (queue 2 ms, prefill 0.41 s)"
    stopped = figures.reply_cost(Usage(TokenSources(computed=12), 0, 0.002, 3.2, 0))
    assert stopped == "stopped before the first token (3.20 s)"
    assert figures.prompt_cost(Usage(TokenSources(computed=12), 1, 0, 0, 0)) == "0 of 12 prompt tokens cached"
    assert figures.prompt_cost(Usage(TokenSources(device=8, computed=4), 1, 0, 0, 0)) == "8 of 12 prompt tokens cached"


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        (
            Usage(TokenSources(computed=10), 21, 0, 0.5, 2, is_detailed=False),
            "21 tokens · 10.0 tok/s · 0.50 s to first token · 10 prompt tokens",
        ),
        (
            Usage(TokenSources(device=4, computed=6), 21, 0, 0.5, 0, is_detailed=False),
            "21 tokens · 0.50 s to first token · 10 prompt tokens, 4 cached",
        ),
        (Usage(TokenSources(), 0, 0, 0.5, 2, is_detailed=False), "0.50 s to first token"),
    ],
)
def test_unknown_costs_are_left_out(usage: Usage, words: str) -> None:
    assert " · ".join(figures.details(usage)) == words


def test_line_of_a_message_without_text_says_why() -> None:
    reply = Message(MessageId("1"), None, Role.ASSISTANT, "", 0.0, finish=Finish.STOPPED)
    assert figures.message_line(reply, 60) == "Reply: (stopped before its first word)"
    assert figures.message_line(replace(reply, text="Of course.\n```\nx = 1\n```"), 60) == "Reply: Of course. x = 1"
    files = Message(MessageId("2"), None, Role.USER, "", 0.0, (Attachment("a.txt", "a"),))
    assert figures.message_line(files, 60) == "You: (files)"


def test_budget_shows_free_or_exceeding_tokens() -> None:
    assert figures.budget(ContextBudget(8192, 120, 1100, 1024)) == "context 15 % · 7.0k tokens free"
    assert figures.budget(ContextBudget(2048, 120, 1100, 1024)) == "context 60 % · a reply needs 196 more tokens"
    assert figures.budget(ContextBudget(2048, 120, 1970, 1024)) == "context 100 % · a reply needs 1.1k more tokens"
    assert figures.budget(ContextBudget(512, 0, 385, 128)) == "context 75 % · a reply needs 1 more token"
    assert figures.budget(ContextBudget(None, 120, 12_000, 1024)) == "12k tokens (limit unknown)"
    assert figures.budget(ContextBudget(None, 0, 1, 1024)) == "1 token (limit unknown)"


def test_details_of_a_budget_add_up_to_its_share() -> None:
    parts, reserve = "System prompt 120 + messages 1,100", "1,024 tokens are kept free for the reply."
    assert figures.budget_details(ContextBudget(8192, 120, 1100, 1024)) == f"{parts} = 15 % of 8,192 tokens. {reserve}"
    assert figures.budget_details(ContextBudget(1024, 120, 1100, 1024)) == f"{parts} = 1,220 of 1,024 tokens. {reserve}"
    assert figures.budget_details(ContextBudget(None, 120, 1100, 1024)) == f"{parts} = 1,220 tokens. {reserve}"


@pytest.mark.parametrize(
    ("value", "words"), [(0.2, "0 s left"), (40.4, "40 s left"), (720, "12 min left"), (10_000, "3 h left")]
)
def test_time_left_is_rounded(value: float, words: str) -> None:
    assert figures.time_left(value) == words
