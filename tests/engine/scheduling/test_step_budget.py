import random

from engine.request import Origin, Request, ServiceClass
from engine.sampling_params import SamplingParams
from engine.scheduling.step_budget import WEIGHTS, shares

INTERACTIVE, NORMAL, BACKGROUND = ServiceClass


def divide(budget: int, *wanted: tuple[ServiceClass, int]) -> list[int]:
    requests = [
        (Request(number, (1,), SamplingParams(), origin=Origin(service)), tokens)
        for number, (service, tokens) in enumerate(wanted)
    ]
    given = shares(requests, budget)
    return [given[number] for number in range(len(wanted))]


def test_equals_get_the_same() -> None:
    assert divide(90, (NORMAL, 1000), (NORMAL, 2000), (NORMAL, 500)) == [30, 30, 30]


def test_what_one_does_not_want_the_others_get() -> None:
    assert divide(128, (NORMAL, 4000), (NORMAL, 10), (NORMAL, 1)) == [117, 10, 1]


def test_a_higher_class_gets_more_and_no_class_nothing() -> None:
    assert divide(105, (BACKGROUND, 900), (NORMAL, 900), (INTERACTIVE, 900)) == [5, 20, 80]


def test_nothing_is_left_over_and_nothing_is_given_twice() -> None:
    rng = random.Random(6)
    for _ in range(500):
        wanted = [(rng.choice(list(ServiceClass)), rng.randrange(1, 300)) for _ in range(rng.randrange(1, 9))]
        budget = rng.randrange(1, 500)
        given = divide(budget, *wanted)
        assert sum(given) == min(budget, sum(tokens for _, tokens in wanted))
        for (service, tokens), own in zip(wanted, given, strict=True):
            assert 0 <= own <= tokens
            # Nobody who got less than was wanted could envy another of a class that counts no more.
            rates = [got / WEIGHTS[other] for (other, _), got in zip(wanted, given, strict=True)]
            assert own == tokens or (own + 1) / WEIGHTS[service] >= max(rates) - 1


def test_of_no_budget_there_is_nothing() -> None:
    assert divide(0, (NORMAL, 5)) == [0]
    assert shares([], 5) == {}
