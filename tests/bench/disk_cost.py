"""What blocks in files cost and save, on the engine alone: `python -m tests.bench.disk_cost MODEL`.

In turn with files and without: tokens a second of one stream, and of a prompt that is read. Then, for prompts of
several lengths, the time to the first token when all is computed, when it comes from files, and when it is on the
device.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from app.server.host import SWITCH_SECONDS
from engine.load_options import DiskOptions, LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.request import Request
from engine.sampling_params import SamplingParams

LENGTHS = (512, 2000, 6000)


def load(model: Path, folder: Path | None, threads: int, code_cache: Path | None) -> ModelEngine:
    disk = DiskOptions(folder, 10 << 30) if folder else None
    options = LoadOptions(context_length=8192, threads=threads, fingerprint="00" * 32, disk=disk, code_cache=code_cache)
    with open_checkpoint(model) as checkpoint:
        return load_engine(checkpoint, options)


def some_prompt(length: int) -> tuple[int, ...]:
    return tuple(random.randrange(10, 30_000) for _ in range(length))


def run(engine: ModelEngine, prompt: tuple[int, ...], tokens: int) -> tuple[Request, list[float]]:
    """The request, and when its tokens came, in seconds from its beginning."""
    request = engine.request(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), frozenset())
    began = time.perf_counter()
    engine.add(request)
    times = []
    while engine.has_requests:
        times += [time.perf_counter() - began for event in engine.step() if event.token_id is not None]
    return request, times


def decode_rate(engine: ModelEngine, tokens: int) -> float:
    _, times = run(engine, some_prompt(64), tokens)
    return (len(times) - 1) / (times[-1] - times[0])


def prefill_rate(engine: ModelEngine) -> float:
    _, times = run(engine, some_prompt(2000), 1)
    return 2000 / times[0]


def show_ratio(name: str, on: Sequence[float], off: Sequence[float]) -> None:
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    print(
        f"{name}: {statistics.median(on):.1f} tok/s with files, {statistics.median(off):.1f} without: "
        f"{statistics.median(ratios):.3f} of it ({min(ratios):.3f}-{max(ratios):.3f})",
        flush=True,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=1500)
    arguments.add_argument("--code-cache", type=Path)
    wanted = arguments.parse_args()
    sys.setswitchinterval(SWITCH_SECONDS)  # as a server has it
    with tempfile.TemporaryDirectory(prefix="disk-cost-") as scratch:
        folder = Path(scratch)
        on, off = (load(wanted.model, it, wanted.threads, wanted.code_cache) for it in (folder, None))
        for name, rate in (("one stream", lambda engine: decode_rate(engine, wanted.tokens)), ("prompt", prefill_rate)):
            rates: dict[ModelEngine, list[float]] = {on: [], off: []}
            for number in range(wanted.rounds):
                for engine in (on, off) if number % 2 else (off, on):
                    rates[engine].append(rate(engine))
                on.flush()
            show_ratio(name, rates[on], rates[off])
        for length in LENGTHS:
            show_restores(wanted.model, folder, length, wanted)


def show_restores(model: Path, folder: Path, length: int, wanted: argparse.Namespace) -> None:
    """The times of one prompt: computed, from files by an engine that was just loaded, and from the device."""
    prompt = some_prompt(length)
    first = load(model, folder, wanted.threads, wanted.code_cache)
    run(first, some_prompt(200), 2)
    _, (computed, *_) = run(first, prompt, 1)
    first.flush()
    second = load(model, folder, wanted.threads, wanted.code_cache)
    run(second, some_prompt(200), 2)
    request, (restored, *_) = run(second, prompt, 1)
    warm, (device, *_) = run(second, prompt, 1)
    size = second.state().counters.disk_read_bytes / 1e6
    print(
        f"{length} tokens: computed {1e3 * computed:.0f} ms, from files {1e3 * restored:.1f} ms ({size:.0f} MB in "
        f"{1e3 * request.cache.restore_seconds:.1f} ms), on the device {1e3 * device:.1f} ms; found "
        f"{request.cache.disk} and {warm.cache.device}",
        flush=True,
    )


if __name__ == "__main__":
    main()
