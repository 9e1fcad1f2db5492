"""The inputs of the sampling kernels."""

import pytest
import torch

from engine.kernels.sampling_rows import UNSEEN, SampleTarget, build_rows, is_plain, needs_reply
from engine.request import Request
from engine.sampling.drawing import ATTEMPTS
from engine.sampling.sampler import uniform
from engine.sampling_params import DryParams, SamplingParams


def target(index: int = 0, **params: object) -> SampleTarget:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return SampleTarget(3, Request(1, (4, 9, 4), sampling, frozenset({2}), output_ids=[9, 9, 5]), index)


def test_columns_are_views_of_one_buffer() -> None:
    rows = build_rows([target(seed=7), target(3, repetition_penalty=2.0, logprobs=4, top_k=50)], 10)
    copied = rows.over(torch.nn.functional.pad(rows.buffer, (0, 40)))
    rows.buffer.fill_(255)
    columns = copied.columns
    assert columns.uniforms[0].tolist() == [uniform(7, 0, attempt) for attempt in range(ATTEMPTS)]
    assert columns.top_k.tolist() == [10, 10]
    assert columns.sources.tolist() == [3, 3]
    assert columns.alternatives.tolist() == [-1, 4]
    assert copied.alternatives == 4
    assert all(column.data_ptr() % 16 == rows.buffer.data_ptr() % 16 for column in rows.columns)


def test_integers_are_columns_of_floats() -> None:
    params = {"temperature": 1, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0}
    rows = build_rows([target(frequency_penalty=0, **params)], 10)
    kinds = [column.dtype for column in build_rows([target(temperature=0.5)], 10).columns]
    assert [column.dtype for column in rows.columns] == kinds


def test_each_token_of_a_row_has_at_most_one_edit() -> None:
    params = {"logit_bias": ((1, 2.0), (2, 5.0), (1, 0.5), (9, -1.0)), "min_tokens": 5, "stop_token_ids": (6,)}
    columns = build_rows([target(), target(3, **params, frequency_penalty=0.5)], 10).columns
    assert columns.edit_rows.tolist() == [1] * 6
    found = zip(columns.edit_ids.tolist(), columns.bias.tolist(), columns.counts.tolist(), strict=True)
    never = -torch.inf
    assert sorted(found) == [(1, 2.5, -1), (2, never, -1), (4, 0.0, 0), (5, 0.0, 1), (6, never, -1), (9, -1.0, 2)]
    assert UNSEEN == -1


def test_pending_tokens_count_toward_min_tokens() -> None:
    params = {"min_tokens": 5, "temperature": 0.0}
    assert len(build_rows([target(4, **params)], 10).columns.edit_ids) == 1
    assert len(build_rows([target(5, **params)], 10).columns.edit_ids) == 0
    assert not is_plain(target(4, **params))
    assert is_plain(target(5, **params))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.1, "xtc_probability": 1.0, "xtc_threshold": 0.1},
        {"logprobs": 0},
        {"logit_bias": ((1, 1.0),)},
        {"repetition_penalty": 1.1},
        {"dry": DryParams(0.5)},
    ],
    ids=str,
)
def test_changed_distributions_and_reports_are_not_plain(params: dict[str, object]) -> None:
    assert is_plain(target(temperature=0.0, top_k=3, xtc_probability=1.0))
    assert is_plain(target(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1))
    assert not is_plain(target(**{"temperature": 0.0} | params))  # type: ignore[arg-type]


def test_penalties_need_all_previous_tokens() -> None:
    for early in (target(4, presence_penalty=1.0), target(4, dry=DryParams(0.5))):
        assert needs_reply(early.request)
        assert not early.request.runs_ahead
        with pytest.raises(ValueError, match="all tokens before"):
            build_rows([early], 10)
    assert not needs_reply(target(min_tokens=5, logit_bias=((1, 1.0),), xtc_probability=1.0).request)


def test_token_id_outside_the_vocabulary_is_rejected() -> None:
    with pytest.raises(IndexError, match="vocabulary of 10"):
        build_rows([target(logit_bias=((10, 1.0),))], 10)
