"""Compare the estimated memory of models with the memory that the CPU engine uses: `python -m tests.bench.fit_figures`.

It measures random models of several families, some hundred megabytes each, and the given GGUF files. A separate process
loads each model, prefills a prompt that fills the context, and generates a reply. The report has the growth of its
memory that no file backs (RssAnon). Run it twice: compiling the kernels takes about 100 MB.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from app.settings.settings import load_settings
from engine.fit import fit
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.sampling_params import SamplingParams
from engine.system_memory import resident_bytes
from tests.engine.models.family import SHAPE
from tests.engine.models.family_checkpoints import FAMILIES

CONTEXT = 2048
LARGE: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
}
LAYERS = 8
NAMES = ("llama", "qwen3", "gemma2", "gemma3", "olmo2", "granite")


@dataclass(frozen=True)
class Figures:
    """Sizes in bytes."""

    estimated: int
    loaded: int  # memory growth after loading the model
    full: int  # memory growth when the context is full


def make(folder: Path, name: str) -> Path:
    """Save a random bfloat16 model with the options of the family's tests, and return its folder."""
    family = FAMILIES[name]
    config = family.config(**{**SHAPE, **family.options, **LARGE, "num_hidden_layers": LAYERS})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


def measure(path: Path, kv_type: str) -> Figures:
    """Load a model and fill its context. Run this in a process that has not loaded a model before."""
    settings = load_settings()
    options = LoadOptions(device="cpu", context_length=CONTEXT, kv_type=kv_type, code_cache=settings.cache_dir)
    with open_checkpoint(path) as checkpoint:
        plan = fit(checkpoint, options)
        before = resident_bytes()
        engine = load_engine(checkpoint, options)
    loaded = resident_bytes()
    prompt = tuple(random.randrange(10, 30_000) for _ in range(CONTEXT - 20))
    engine.add(engine.request(prompt, SamplingParams(max_tokens=19, ignore_eos=True), frozenset()))
    while engine.has_requests:
        engine.step()
    full = resident_bytes()
    if before is None or loaded is None or full is None:
        raise OSError("the memory of a process is unknown on this system")
    return Figures(plan.needed, loaded - before, full - before)


def print_row(name: str, path: Path, kv_type: str) -> None:
    command = [sys.executable, "-m", "tests.bench.fit_figures", "--measure", str(path), "--kv-type", kv_type]
    figures = Figures(**json.loads(subprocess.check_output(command)))
    estimated, loaded, full = (value / 1e6 for value in (figures.estimated, figures.loaded, figures.full))
    print(
        f"| {name} | {kv_type} | {estimated:.0f} | {loaded:.0f} | {full:.0f} | {(estimated - full) / full:+.1%} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files or folders to measure in addition")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=NAMES, help="families of the random models")
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(vars(measure(chosen.measure, chosen.kv_type))))
        return
    print("| model | KV | estimated, MB | loaded | full | difference |\n|---|---|---|---|---|---|", flush=True)
    for path in chosen.models:
        for kv_type in ("f16", "int8"):
            print_row(path.name, path, kv_type)
    for name in chosen.families:
        with tempfile.TemporaryDirectory() as folder:
            print_row(name, make(Path(folder), name), chosen.kv_type)


if __name__ == "__main__":
    main()
