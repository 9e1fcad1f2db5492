"""Count the kernels that loading a model compiles, without a GPU.

    python -m tests.kernels.loaded_kernels

The model is an 8B Llama in Q4_K_M. A kernel takes 0.5 to 2.5 seconds to compile on one core, so that a user waits for
them at the first start. Prints the number of compiled variants of each kernel, and fails if a card needs more than
MOST_KERNELS.
"""

import sys
from collections import Counter
from dataclasses import replace

from tests.kernels.cards import CARDS
from tests.kernels.launches import record_launches
from tests.kernels.recorded_steps import RecordedModel
from tests.kernels.shapes import LLAMA_8B
from tests.support.weight_mixes import Q4_K_M

MOST_KERNELS = 40
NAMES = ("3090", "4090", "5090", "H100")
CONTEXT, REQUESTS = 4096 + 512, 128
MODEL = replace(LLAMA_8B, layers=LLAMA_8B.layers[:2])  # more layers have the same kernels


def main() -> int:
    most = 0
    for card in CARDS:
        if card.name.endswith(NAMES):
            with record_launches() as launches:
                RecordedModel(card, MODEL, Q4_K_M).launch_every_kernel(CONTEXT, REQUESTS)
            names = Counter(launch.name for launch in launches.values())
            counts = ", ".join(f"{name} {count}" for name, count in names.most_common())
            print(f"{card.name}: {len(launches)} kernels: {counts}")
            most = max(most, len(launches))
    if most > MOST_KERNELS:
        print(f"FAULT: more than {MOST_KERNELS} kernels")
    return 0 if 0 < most <= MOST_KERNELS else 1


if __name__ == "__main__":
    sys.exit(main())
