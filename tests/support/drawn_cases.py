"""Tests of very many cases alike: each run draws a share of them, another one each time.

`@pytest.mark.share(2, "name", "kv_type")` has two cases run for each name with each kv_type. Tests of one file that
have as many cases draw the same ones: what several of them need is built once. A run tells its seed, with which
`--seed` draws the same share again; `--every-case` runs all. Who names single cases gets them.
"""

import random
from collections import defaultdict
from collections.abc import Mapping

import pytest

MOST_SEED = 1 << 32


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="draw the cases that a run with this seed has drawn")
    parser.addoption("--every-case", action="store_true", help="run all cases of tests that draw a share of theirs")


def choose_seed(config: pytest.Config) -> None:
    """Once for a run: the workers of pytest-xdist are told that of the first process, by `tell_seed`."""
    told: Mapping[str, int] = getattr(config, "workerinput", {})
    if "seed" in told:
        config.option.seed = told["seed"]
    elif config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(MOST_SEED)


def tell_seed(config: pytest.Config, worker: dict[str, int]) -> None:
    worker["seed"] = config.option.seed


def draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out of `items` what is not drawn."""
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
