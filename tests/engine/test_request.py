from engine.request import Request, TokenSources
from engine.sampling_params import SamplingParams


def test_token_ids_span_prompt_and_output() -> None:
    request = Request(1, (10, 11, 12), SamplingParams(), output_ids=[20, 21])
    whole = [10, 11, 12, 20, 21]
    for start in range(6):
        for stop in range(start, 6):
            assert request.token_ids(start, stop) == whole[start:stop]


def test_cached_is_the_sum_of_device_host_and_disk_tokens() -> None:
    assert TokenSources(device=1, host=2, disk=4, computed=8, restore_seconds=0.5, skipped=3).cached == 7


def test_adding_token_sources_adds_every_field() -> None:
    one = TokenSources(device=1, host=2, disk=3, computed=4, restore_seconds=0.5, skipped=6)
    other = TokenSources(device=10, host=20, disk=30, computed=40, restore_seconds=5.0, skipped=60)
    assert one + other == TokenSources(device=11, host=22, disk=33, computed=44, restore_seconds=5.5, skipped=66)
