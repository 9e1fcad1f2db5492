"""Workloads of `ingle bench`, and their prompts."""

from app.bench.workload import SUITE, Load, Rate, loads_of, rows_of


def test_no_two_prompts_share_a_prefix() -> None:
    """Prompts differ between streams, turns, and loads of the same length, so that a prefix cache never matches."""
    loads = [Load(40, 8), Load(40, 16), Load(40, 8, 4), Load(64, 8)]
    prompts = [prompt for load in loads for turn in range(3) for prompt in load.prompts(turn, 1000)]
    assert len({prompt[:16] for prompt in prompts}) == len(prompts) == 21


def test_prompts_are_deterministic() -> None:
    load = Load(40, 8, 2)
    assert load.prompts(1, 1000) == load.prompts(1, 1000)
    assert [len(prompt) for prompt in load.prompts(1, 1000)] == [40, 40]
    assert all(0 <= token_id < 97 for prompt in load.prompts(1, 97) for token_id in prompt)


def test_rows_of_one_stream_use_one_load() -> None:
    rows = rows_of(512, 128, 1)
    assert loads_of(rows) == (Load(512, 128),)
    assert [row.name for row in rows] == ["prefill_tok_s", "decode_tok_s", "throughput_tok_s", "end_to_end_tok_s"]


def test_rows_of_several_streams_use_two_loads() -> None:
    single, crowd = loads_of(rows_of(60, 24, 16))
    assert (single.streams, crowd.streams) == (1, 16)
    assert crowd.rates == {Rate.DECODE, Rate.END_TO_END}


def test_suite_measures_only_the_rates_of_its_rows() -> None:
    assert len({row.name for row in SUITE}) == len(SUITE) == 5
    assert all(row.load.rates == {row.rate} for row in SUITE)
