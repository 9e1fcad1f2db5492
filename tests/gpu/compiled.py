"""Compile the kernels of the benchmark's models for a card that is not there, into a folder to carry to it.

    python -m tests.gpu.compiled FOLDER [--card H100]

Needs the Python, torch, and Triton of the other machine, because Triton's keys depend on them. There, pass the folder
to `tests/gpu/run.sh --compiled`. The folder stays below MOST_BYTES.
"""

import argparse
import os
import sys
from pathlib import Path

MOST_BYTES = 50 << 20
MIXES = ("Q4_K_M", "e4m3 channel", "BF16")
CONTEXT, REQUESTS = 4096 + 512, 128


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile kernels for a card that is not there.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--card", default="H100", help="the last word of the card's name")
    parser.add_argument("--tiny", action="store_true", help="one small model, to try the command")
    given = parser.parse_args()
    # read when Triton is imported
    os.environ |= {"TRITON_CACHE_DIR": str(given.folder), "TRITON_STORE_BINARY_ONLY": "1"}
    from tests.gpu.compiled_models import compile_model
    from tests.kernels.cards import CARDS
    from tests.kernels.shapes import LLAMA_8B, QWEN_30B_A3B, TINY

    card = next(card for card in CARDS if card.name.endswith(given.card))
    models = [(mix, LLAMA_8B) for mix in MIXES] + [("Q4_K_M", QWEN_30B_A3B)]
    for mix, model in [("BF16", TINY)] if given.tiny else models:
        count = compile_model(card, model, mix, CONTEXT, 4 if given.tiny else REQUESTS)
        print(f"{mix}: {count} kernels, {folder_bytes(given.folder) / 1e6:.1f} MB", flush=True)
    return 0 if folder_bytes(given.folder) < MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
