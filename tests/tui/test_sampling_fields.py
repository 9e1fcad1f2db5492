"""Tests for the text fields of sampling parameters."""

import pytest

from tui import sampling_fields
from tui.types import Sampling


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.7, 0.95, 40, 0.05, 1.1, 512, 2**53 + 1, True), Sampling(temperature=0.0, thinking=False)],
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


LAST = ["1.0 (default)", "random (default)"]  # hints of the penalty and the seed


@pytest.mark.parametrize(
    ("recommended", "hints"),
    [
        (Sampling(0.7, top_k=20), ["0.7 (model)", "1.0 (default)", "20 (model)", "0 (default)", *LAST]),
        (Sampling(temperature=0.0), ["0.0 (model)", "1.0 (default)", "0 (default)", "0 (default)", *LAST]),
        (None, ["model default"] * 6),
    ],
)
def test_hint_is_the_value_in_force_and_its_source(recommended: Sampling | None, hints: list[str]) -> None:
    fields = sampling_fields.SAMPLING_FIELDS
    assert [field.hint(recommended) for field in fields] == hints


def test_reply_has_no_length_limit_by_default() -> None:
    assert [field.hint(Sampling()) for field in sampling_fields.REPLY_FIELDS] == ["no limit (default)"]
