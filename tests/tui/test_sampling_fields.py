"""Tests for the text fields of sampling parameters."""

import pytest

from tui import sampling_fields
from tui.types import Sampling


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.7, 0.95, 40, 0.05, 512, 2**53 + 1, True), Sampling(temperature=0.0, thinking=False)],
)
def test_sampling_fields_round_trip(sampling: Sampling) -> None:
    assert sampling_fields.parse(sampling_fields.texts(sampling), thinking=sampling.thinking) == sampling


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("temperature", "warm", "must be a number"),
        ("temperature", "nan", "between"),
        ("top_p", "1.5", "between 0 and 1"),
        ("top_k", "1.5", "must be a whole number"),
        ("max_tokens", "0", "between 1"),
    ],
)
def test_invalid_fields_are_explained(name: str, text: str, complaint: str) -> None:
    with pytest.raises(sampling_fields.InvalidField, match=complaint):
        sampling_fields.parse({name: text}, thinking=None)
