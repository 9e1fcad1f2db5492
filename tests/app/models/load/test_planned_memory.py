"""Advice on models that do not fit together, computed with synthetic plans of the memory of a CPU and of a GPU."""

from collections.abc import Sequence
from typing import TypeAlias

import pytest

from app.models.load.planned_memory import LoadPlan, Variant, advice_on
from app.models.residency.advice import Advice, Share
from app.models.residency.ledger import HOST
from engine.fit import MemoryPlan

GB = 1_000_000_000
CONTEXTS = (65_536, 32_768, 16_384, 8_192, 4_096)
USEFUL = 32_768

ByType: TypeAlias = tuple[LoadPlan, LoadPlan]  # with caches of 16 bits and of 8 bits


def planned(
    weights: int, context: int, *, trained: int = 1 << 17, gpu: int | None = None, share: float = 1, asked: bool = True
) -> MemoryPlan:
    """Return the plan of a model with `weights` GB, and 0.1 GB of cache per 1,024 tokens."""
    held = min(context, trained)
    least, most = (round(share * tokens / 1024 * GB / 10) for tokens in (held if asked else min(held, 4096), held))
    return MemoryPlan(gpu, weights * GB, 0, 0, least, most, host_weights=0 if gpu is None else GB)


def advised(available: float, *weights: int, trained: int = 1 << 17, gpu: int | None = None) -> Advice:
    """Return the advice on two models with these weights, for a memory of `available` GB."""
    plans: list[LoadPlan] = []
    changed: list[Sequence[ByType]] = []
    for size in weights:
        whole = planned(size, trained, trained=trained, gpu=gpu, asked=False)
        plans.append(LoadPlan(whole, planned(size, USEFUL, trained=trained, gpu=gpu)))
        of_context = [
            [planned(size, context, trained=trained, gpu=gpu, share=share) for share in (1, 0.5)]
            for context in CONTEXTS
        ]
        changed.append([(LoadPlan(plain, plain), LoadPlan(small, small)) for plain, small in of_context])
    variants = [
        Variant(context, kv_type, (one[number], other[number]))
        for number, kv_type in enumerate(("", "int8"))
        for context, one, other in zip(CONTEXTS, *changed, strict=True)
    ]
    memory = {HOST: round(available * GB)} if gpu is None else {"cuda:0": round(available * GB), HOST: 64 * GB}
    return advice_on((plans[0], plans[1]), variants, memory)


AT_32K, AT_64K = "context = 32768 (host 7.2 GB and 9.2 GB of {})", "context = 65536 (host 10.4 GB and 12.4 GB of {})"
AT_4K = "context = 4096 (host 4.4 GB and 6.4 GB of {})"
SMALL_64K = "context = 65536 and kv_type = int8 (host 7.2 GB and 9.2 GB of {})"
SMALL_8K = "context = 8192 and kv_type = int8 (host 4.4 GB and 6.4 GB of {})"


@pytest.mark.parametrize(
    ("available", "remedy"),
    [
        (40, ""),
        (24, f"Both fit with {AT_64K}. Set it in config.toml."),
        (22, f"Both fit with {AT_32K}, or with {SMALL_64K}. Set it in config.toml."),
        (
            11.0,
            f"Both fit with {AT_4K}, or with {SMALL_8K}. Set it in config.toml.",
        ),
        (
            10.1,
            "They do not fit with context = 4096 and kv_type = int8 either (host 4.2 GB and 6.2 GB of {}); "
            "choose a smaller model.",
        ),
    ],
)
def test_longest_contexts_that_fit_are_advised(available: float, remedy: str) -> None:
    assert advised(available, 4, 6).remedy == remedy.replace("{}", f"{available:.1f} GB")


def test_numbers_are_those_of_the_models_in_their_order() -> None:
    # the first model would take half of the free memory, and the second one needs a context of 32,768 tokens
    assert advised(20, 4, 6).shares == {HOST: Share((14 * GB, 9_200_000_000), 20 * GB)}
    assert advised(24.5, 6, 4).shares[HOST].needed[0] > advised(24.5, 6, 4).shares[HOST].needed[1]


def test_context_is_not_longer_than_that_of_the_models() -> None:
    assert advised(11.5, 4, 6, trained=8192).remedy.startswith("Both fit with context = 4096 ")
    assert advised(11.7, 4, 6, trained=8192).remedy == ""


def test_numbers_of_a_gpu_include_the_memory_of_the_machine() -> None:
    advice = advised(20, 4, 6, gpu=0)
    assert advice.shares["cuda:0"].available == 20 * GB
    assert advice.shares[HOST] == Share((GB, GB), 64 * GB)
    assert "cuda:0 7.2 GB and 9.2 GB of 20.0 GB, host 1.0 GB and 1.0 GB of 64.0 GB" in advice.remedy
