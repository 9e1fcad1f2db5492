import random

from engine.request import Origin, QueueTimes, Request, ServiceClass
from engine.sampling_params import SamplingParams
from engine.scheduling.priority import (
    CLASS_DELAY,
    MAX_PREEMPTIONS,
    PREEMPTION_BONUS,
    PRIORITY_STEP,
    WEIGHTS,
    is_pinned,
    priority_key,
    split_token_budget,
)

INTERACTIVE, NORMAL, BACKGROUND = ServiceClass
numbers = iter(range(1_000_000))


def request(service: ServiceClass = NORMAL, *, arrival: float = 0, priority: int = 0, preemptions: int = 0) -> Request:
    made = Request(next(numbers), (1,), SamplingParams(), origin=Origin(service, priority), queue=QueueTimes(arrival))
    made.num_preemptions = preemptions
    return made


def order(*requests: Request) -> list[int]:
    return [requests.index(it) for it in sorted(requests, key=priority_key)]


def test_oldest_request_of_a_class_is_first() -> None:
    assert order(request(arrival=2), request(arrival=1), request(arrival=1)) == [1, 2, 0]


def test_higher_class_is_first() -> None:
    assert order(request(BACKGROUND), request(INTERACTIVE), request(NORMAL)) == [1, 2, 0]


def test_long_wait_outranks_a_higher_class() -> None:
    late = CLASS_DELAY[BACKGROUND] + 1
    assert order(request(BACKGROUND), request(INTERACTIVE, arrival=late)) == [0, 1]
    assert order(request(BACKGROUND), request(INTERACTIVE, arrival=late - 2)) == [1, 0]


def test_priority_orders_requests_within_a_class_only() -> None:
    assert order(request(priority=-1), request(), request(priority=1)) == [2, 1, 0]
    assert order(request(NORMAL, priority=100), request(INTERACTIVE, priority=-100)) == [1, 0]
    assert min(CLASS_DELAY[NORMAL], CLASS_DELAY[BACKGROUND] - CLASS_DELAY[NORMAL]) > 200 * PRIORITY_STEP


def test_preempted_request_moves_ahead_of_later_ones() -> None:
    assert order(request(arrival=0), request(arrival=PREEMPTION_BONUS - 1, preemptions=1)) == [1, 0]


def test_pinned_request_is_before_all_others() -> None:
    often = request(BACKGROUND, arrival=1e9, preemptions=MAX_PREEMPTIONS - 1)
    assert is_pinned(often)
    assert not is_pinned(request(preemptions=MAX_PREEMPTIONS - 2))
    assert order(request(INTERACTIVE), often) == [1, 0]


def divide(budget: int, *wanted: tuple[ServiceClass, int]) -> list[int]:
    requests = [
        (Request(number, (1,), SamplingParams(), origin=Origin(service)), tokens)
        for number, (service, tokens) in enumerate(wanted)
    ]
    given = split_token_budget(requests, budget)
    return [given[number] for number in range(len(wanted))]


def test_equal_requests_get_equal_shares() -> None:
    assert divide(90, (NORMAL, 1000), (NORMAL, 2000), (NORMAL, 500)) == [30, 30, 30]


def test_unused_shares_go_to_the_other_requests() -> None:
    assert divide(128, (NORMAL, 4000), (NORMAL, 10), (NORMAL, 1)) == [117, 10, 1]


def test_higher_class_gets_more_and_every_class_gets_some() -> None:
    assert divide(105, (BACKGROUND, 900), (NORMAL, 900), (INTERACTIVE, 900)) == [5, 20, 80]


def test_split_uses_the_whole_budget_fairly() -> None:
    rng = random.Random(6)
    for _ in range(500):
        wanted = [(rng.choice(list(ServiceClass)), rng.randrange(1, 300)) for _ in range(rng.randrange(1, 9))]
        budget = rng.randrange(1, 500)
        given = divide(budget, *wanted)
        assert sum(given) == min(budget, sum(tokens for _, tokens in wanted))
        for (service, tokens), own in zip(wanted, given, strict=True):
            assert 0 <= own <= tokens
            # No request with an unmet need has a smaller share, by weight, than another request.
            rates = [got / WEIGHTS[other] for (other, _), got in zip(wanted, given, strict=True)]
            assert own == tokens or (own + 1) / WEIGHTS[service] >= max(rates) - 1


def test_zero_budget_gives_zero_tokens() -> None:
    assert divide(0, (NORMAL, 5)) == [0]
    assert split_token_budget([], 5) == {}
