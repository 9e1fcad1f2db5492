"""Check that the kernels of FP8 prompts of any length are compiled when a model is loaded, without a GPU.

    python -m tests.kernels.recorded_prompts

The tile of a product of 8-bit floats depends on the number of tokens. Prints the number of kernels for each card, and
fails if a prompt needs one that `launch_every_kernel` does not launch.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

from quant.kernels.card import Card
from tests.kernels.cards import CARDS
from tests.kernels.launches import record_launches
from tests.kernels.recorded_steps import RecordedModel, Step
from tests.kernels.shapes import LLAMA_8B

KERNEL = "_float8_batch_kernel"
PROMPTS = (33, 65, 130, 200, 300, 500, 700, 1000, 1500, 2048, 3000, 4096)  # tokens
REQUESTS, CONTEXT = 8, 8192
MODEL = replace(LLAMA_8B, layers=LLAMA_8B.layers[:2])  # the last layer multiplies one token of a prompt


def kernels_in_advance(recorded: RecordedModel) -> set[str]:
    """Return the kernels that are compiled when the model is loaded."""
    with record_launches() as launches:
        recorded.launch_every_kernel(CONTEXT, REQUESTS)
    return {str(it) for it in launches.values() if it.name == KERNEL}


def kernels_of_prompts(recorded: RecordedModel) -> Iterator[tuple[int, str]]:
    """Yield numbers of tokens, and the kernels of prompts of this length."""
    for tokens in PROMPTS:
        if tokens <= recorded.step_tokens:
            for work in recorded.record(Step(1, tokens, tokens)):
                if work.launch and work.launch.name == KERNEL:
                    yield tokens, str(work.launch)


def check(card: Card) -> bool:
    """Print the number of kernels, and those that are missing. Returns whether there are none."""
    recorded = RecordedModel(card, MODEL, "e4m3 channel")
    known = kernels_in_advance(recorded)
    missing = {kernel: tokens for tokens, kernel in kernels_of_prompts(recorded) if kernel not in known}
    print(f"{card.name}: {len(known)} kernels")
    for kernel, tokens in missing.items():
        print(f"FAULT: a prompt of {tokens} tokens needs {kernel}")
    return bool(known) and not missing


if __name__ == "__main__":
    results = [check(card) for card in CARDS if card.multiplies_float8]
    sys.exit(0 if all(results) else 1)
