from engine.request import Request
from engine.sampling_params import SamplingParams


def test_token_ids_span_prompt_and_output() -> None:
    request = Request(1, (10, 11, 12), SamplingParams(), output_ids=[20, 21])
    whole = [10, 11, 12, 20, 21]
    for start in range(6):
        for stop in range(start, 6):
            assert request.token_ids(start, stop) == whole[start:stop]
