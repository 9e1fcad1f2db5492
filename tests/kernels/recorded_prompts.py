"""Check that the kernels of prompts of any length are compiled when a model is loaded, without a GPU.

    python -m tests.kernels.recorded_prompts

The tile of a product of 8-bit floats or of experts depends on the number of tokens. Prints the number of kernels for
each card, and fails if a prompt needs one that `launch_every_kernel` does not launch.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from engine.model_config import ModelConfig
from quant.kernels.card import Card
from tests.kernels.cards import CARDS
from tests.kernels.launches import record_launches
from tests.kernels.recorded_steps import RecordedModel, Step
from tests.kernels.shapes import LLAMA_8B, QWEN_30B_A3B
from tests.support.weight_mixes import Q4_K_M

PROMPTS = (33, 65, 130, 200, 300, 500, 700, 1000, 1500, 2048, 3000, 4096)  # tokens
REQUESTS, CONTEXT = 8, 8192


@dataclass(frozen=True, slots=True)
class Case:
    """Products whose kernels depend on the number of tokens."""

    kernels: tuple[str, ...]
    model: ModelConfig
    mix: str
    needs: Callable[[Card], bool]  # whether a card has these products


CASES = (
    Case(("_float8_batch_kernel",), LLAMA_8B, "e4m3 channel", lambda card: card.multiplies_float8),
    Case(("_integer_experts_kernel", "_batch_kernel"), QWEN_30B_A3B, Q4_K_M, lambda card: card.prefers_integers),
)


def kernels_in_advance(recorded: RecordedModel, case: Case) -> set[str]:
    """Return the kernels that are compiled when the model is loaded."""
    with record_launches() as launches:
        recorded.launch_every_kernel(CONTEXT, REQUESTS)
    return {str(it) for it in launches.values() if it.name in case.kernels}


def kernels_of_prompts(recorded: RecordedModel, case: Case) -> Iterator[tuple[int, str]]:
    """Yield numbers of tokens, and the kernels of prompts of this length."""
    for tokens in PROMPTS:
        if tokens <= recorded.step_tokens:
            for work in recorded.record(Step(1, tokens, tokens)):
                if work.launch and work.launch.name in case.kernels:
                    yield tokens, str(work.launch)


def check(card: Card, case: Case) -> bool:
    """Print the number of kernels, and those that are missing. Returns whether there are none."""
    # the last layer multiplies one token of a prompt
    recorded = RecordedModel(card, replace(case.model, layers=case.model.layers[:2]), case.mix)
    known, needed = kernels_in_advance(recorded, case), dict[str, int]()
    for tokens, kernel in kernels_of_prompts(recorded, case):
        needed.setdefault(kernel, tokens)
    missing = {kernel: tokens for kernel, tokens in needed.items() if kernel not in known}
    print(f"{card.name}, {case.mix}: {len(known)} kernels")
    for kernel, tokens in missing.items():
        print(f"FAULT: a prompt of {tokens} tokens needs {kernel}")
    return all(any(name in kernel for kernel in needed) for name in case.kernels) and not missing


if __name__ == "__main__":
    results = [check(card, case) for case in CASES for card in CARDS if case.needs(card)]
    sys.exit(0 if all(results) else 1)
