import pytest

from engine.errors import InvalidSampling
from engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 1.5),
        ("min_p", -1.0),
        ("repetition_penalty", 0.0),
        ("xtc_probability", 1.5),
        ("xtc_threshold", -0.1),
        ("presence_penalty", 1e9),
        ("frequency_penalty", float("-inf")),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 10**400),
        ("temperature", 100.1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("stop", ("",)),
        ("stop", ("x",) * 65),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, float("nan")),)),
        ("logit_bias", ((1, 0.0),) * 1025),
    ],
)
def test_error_names_out_of_range_values(parameter: str, value: object) -> None:
    with pytest.raises(InvalidSampling) as caught:
        SamplingParams(**{parameter: value})  # type: ignore[arg-type]
    assert caught.value.parameter == parameter
    assert parameter in str(caught.value)


def test_min_tokens_above_max_tokens_is_rejected() -> None:
    with pytest.raises(InvalidSampling, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize("params", [{"logit_bias": ((100, 1.0),)}, {"stop_token_ids": (-1,)}])
def test_ids_outside_the_vocabulary_are_rejected(params: dict[str, object]) -> None:
    with pytest.raises(InvalidSampling, match="vocabulary"):
        SamplingParams(**params).check_vocabulary(100)  # type: ignore[arg-type]


def test_requests_without_a_seed_get_different_seeds() -> None:
    assert SamplingParams().seed != SamplingParams().seed
