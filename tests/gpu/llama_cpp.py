"""Compare this engine with a CUDA build of llama.cpp on the same GGUF file."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from app.bench.own_engine import OwnEngine
from app.bench.workload import Load, Rate
from engine.loading import load_engine, open_checkpoint
from tests.gpu.engine import options_of
from tests.gpu.figures import Figure
from tests.gpu.machine import Machine

PROMPT, REPLY = 512, 96


def figures(machine: Machine, gguf: Path, llama_bench: Path) -> Iterator[Figure]:
    theirs = _theirs(gguf, llama_bench)
    for title, value, other in zip(("prompt", "decode"), _ours(machine, gguf), theirs, strict=True):
        yield Figure(f"{gguf.name}, {title}: llama.cpp", other, "tok/s")
        yield Figure(f"{gguf.name}, {title}: ours", value, "tok/s", value / other, "llama.cpp")


def _ours(machine: Machine, gguf: Path) -> tuple[float, float]:
    with open_checkpoint(gguf) as checkpoint:
        engine = load_engine(checkpoint, options_of(machine))
    own = OwnEngine(engine)
    rates = []
    for load, rate in ((Load(PROMPT, 1), Rate.PREFILL), (Load(PROMPT, REPLY), Rate.DECODE)):
        own.measure(load, load.prompts(0, engine.vocab_size))
        rates.append(own.measure(load, load.prompts(1, engine.vocab_size)).rates[rate])
    return rates[0], rates[1]


def _theirs(gguf: Path, llama_bench: Path) -> tuple[float, float]:
    sizes = ["-p", str(PROMPT), "-n", str(REPLY), "-ngl", "99", "-fa", "1", "-o", "json"]
    done = subprocess.run([llama_bench, "-m", gguf, *sizes], capture_output=True, text=True, check=True)
    read = {bool(test["n_prompt"]): float(test["avg_ts"]) for test in json.loads(done.stdout)}
    return read[True], read[False]
