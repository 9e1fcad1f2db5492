"""Run a random sample of large parametrized tests, a different one in each run.

`@pytest.mark.share(2, "name", "kv_type")` runs two cases for each combination of name and kv_type. Tests of one file
with the same parameters sample the same cases, so that shared fixtures are built once. A run prints its seed; `--seed`
repeats its sample, and `--every-case` runs all cases. A case that is named on the command line always runs.
"""

import random
from collections import defaultdict
from collections.abc import Mapping

import pytest

MOST_SEED = 1 << 32


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="repeat the sample of the run with this seed")
    parser.addoption("--every-case", action="store_true", help="run all cases of sampled tests")


def choose_seed(config: pytest.Config) -> None:
    """Choose the seed of a run. Workers of pytest-xdist use the seed that `send_seed` sent them."""
    received: Mapping[str, int] = getattr(config, "workerinput", {})
    if "seed" in received:
        config.option.seed = received["seed"]
    elif config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(MOST_SEED)


def send_seed(config: pytest.Config, worker: dict[str, int]) -> None:
    worker["seed"] = config.option.seed


def sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove all cases from `items` that are not in the sample."""
    if config.option.every_case:
        return
    alike: dict[tuple[str, ...], list[pytest.Item]] = defaultdict(list)
    counts: dict[tuple[str, ...], int] = {}
    for item in items:
        if isinstance(item, pytest.Function) and (mark := item.get_closest_marker("share")):
            count, *each = mark.args
            key = (item.nodeid.partition("[")[0], *(repr(item.callspec.params[name]) for name in each))
            alike[key].append(item)
            counts[key] = count
    left_out: set[pytest.Item] = set()
    for key, cases in alike.items():
        name, *each = key
        rng = random.Random(f"{config.option.seed} {name.partition('::')[0]} {each}")
        left_out |= {*cases} - {*rng.sample(cases, min(counts[key], len(cases)))}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
