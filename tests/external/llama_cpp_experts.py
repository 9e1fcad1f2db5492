"""Compare mixtures of experts and models with states with llama.cpp: its converter, and its logits.

    python -m tests.external.llama_cpp_experts LLAMA_CPP [FAMILY ...]

LLAMA_CPP is the source of llama.cpp (see `llama_cpp_convert.py`). For each family, a tiny model is converted to a GGUF
file with llama.cpp's converter. The logits of that file are compared with those of transformers, and with those of the
package xllamacpp for the same file. The program exits with status 1 if they differ.
"""

import argparse
import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from engine.model_config import ModelConfig, YarnScaling
from tests.engine.models.expert_families import EXPERT_FAMILIES
from tests.engine.models.family import VOCABULARY
from tests.engine.models.family_checkpoints import make
from tests.engine.models.test_experts import PROMPT, Recording, our_logits, their_logits

CONVERT = Path(__file__).with_name("llama_cpp_convert.py")
RECURRENT = ["lfm2", "qwen3.5", "qwen3.5 moe"]
GEMMA4 = ["gemma4", "gemma4 values are keys", "gemma4 embeddings per layer"]
TOLERANCE = 1e-4  # of logits in float32
LLAMA_TOLERANCE = 0.03  # of log-probabilities; llama.cpp has float16 keys and values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path, metavar="LLAMA_CPP")
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    options = parser.parse_args()
    converted = [name for name, family in EXPERT_FAMILIES.items() if family.gguf] + RECURRENT + GEMMA4
    torch.set_num_threads(1)
    failed = [name for name in options.families or converted if not compare(options.llama_cpp, name)]
    return 1 if failed else 0


def compare(llama_cpp: Path, name: str) -> bool:
    """Compare a family and print the largest differences."""
    with TemporaryDirectory() as folder:
        tiny = make(Path(folder), name, "folder")
        file = tiny.path / "converted.gguf"
        command = [sys.executable, "-P", str(CONVERT), str(llama_cpp), folder, str(file)]
        subprocess.run(command, check=True, capture_output=True)
        ours = our_logits(file, Recording())
        apart = (ours - their_logits(tiny.reference)).abs().max().item()
        if name == "gpt-oss":
            ours = our_logits(file, Recording(), with_rounded_bounds)
        llama_apart = (ours[-1].log_softmax(-1) - llama_log_probabilities(file)).abs().max().item()
    print(f"{name:24} transformers {apart:.1e}, llama.cpp {llama_apart:.1e}", flush=True)
    return apart < TOLERANCE and llama_apart < LLAMA_TOLERANCE


def with_rounded_bounds(config: ModelConfig) -> ModelConfig:
    """Return the configuration with the YaRN of llama.cpp, which rounds bounds that this family does not round."""
    ropes = ((it, it.scaling) for it in config.ropes)
    rounded = (replace(it, scaling=replace(yarn, truncate=True)) for it, yarn in ropes if isinstance(yarn, YarnScaling))
    return replace(config, ropes=tuple(rounded))


def llama_log_probabilities(file: Path) -> Tensor:
    """Return llama.cpp's log-probabilities of the token after the prompt, float32 [vocabulary]."""
    package: Any = importlib.import_module("xllamacpp")
    params = package.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity, params.ui = 512, 1, False, 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = package.Server(params)
    events: list[dict[str, Any]] = []
    request = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": VOCABULARY, "n_probs": VOCABULARY}
    server.handle_completions(request, lambda event: events.append(event) if event else None)
    (listed,) = events[-1]["choices"][0]["logprobs"]["content"]
    found = {it["id"]: it["logprob"] for it in listed["top_logprobs"]}
    return torch.tensor([found[number] for number in range(VOCABULARY)])


if __name__ == "__main__":
    sys.exit(main())
