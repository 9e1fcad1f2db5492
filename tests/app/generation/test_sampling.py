"""A request's own fields win, one by one; what it leaves open is what its model recommends, or its API's default."""

from typing import Any

import pytest

from app.generation.sampling import API_DEFAULTS, DefaultSampling

RECOMMENDED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.1}
API = {"temperature": 0.8, "top_k": 40}
GREEDY = DefaultSampling({**RECOMMENDED, "temperature": 0.0})


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"temperature": 1.5}, {"temperature": 1.5}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"top_k": 0, "seed": 3}, {"top_k": 0, "seed": 3}),
    ],
)
def test_given_fields_win_one_by_one(given: dict[str, Any], changed: dict[str, Any]) -> None:
    assert DefaultSampling(RECOMMENDED).fill(given, API) == RECOMMENDED | changed
    assert API_DEFAULTS.fill(given, API) == API | changed


def test_insertion_has_no_penalty_for_repeating_the_prompt() -> None:
    filled = DefaultSampling(RECOMMENDED).fill({}, API, inserts=True)
    assert filled == {name: value for name, value in RECOMMENDED.items() if name != "repetition_penalty"}
    assert DefaultSampling(RECOMMENDED).fill({"repetition_penalty": 1.3}, inserts=True)["repetition_penalty"] == 1.3


def test_several_replies_are_drawn_where_one_would_be_greedy() -> None:
    assert GREEDY.fill({})["temperature"] == 0
    assert GREEDY.fill({}, several=True)["temperature"] == 0.7
    assert GREEDY.fill({"temperature": 0.0}, several=True)["temperature"] == 0
    assert DefaultSampling(RECOMMENDED).fill({}, several=True)["temperature"] == 0.6
