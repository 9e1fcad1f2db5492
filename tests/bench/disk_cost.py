"""Measure what the KV cache on disk costs and saves in the engine: `python -m tests.bench.disk_cost MODEL`.

First, engines with and without the disk cache run in turn. The report lists their tokens per second for one stream and
for a prefill. Then, for prompts of several lengths, it lists the time to the first token if all blocks are computed,
read from disk, or already on the device.
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


def random_prompt(length: int) -> tuple[int, ...]:
    return tuple(random.randrange(10, 30_000) for _ in range(length))


def run(engine: ModelEngine, prompt: tuple[int, ...], tokens: int) -> tuple[Request, list[float]]:
    """Return the request, and the times at which its tokens were generated, in seconds since it was added."""
    request = engine.request(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), frozenset())
    began = time.perf_counter()
    engine.add(request)
    times = []
    while engine.has_requests:
        times += [time.perf_counter() - began for event in engine.step() if event.token_id is not None]
    return request, times


def decode_rate(engine: ModelEngine, tokens: int) -> float:
    _, times = run(engine, random_prompt(64), tokens)
    return (len(times) - 1) / (times[-1] - times[0])


def prefill_rate(engine: ModelEngine) -> float:
    _, times = run(engine, random_prompt(2000), 1)
    return 2000 / times[0]


def print_ratio(name: str, on: Sequence[float], off: Sequence[float]) -> None:
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    print(
        f"{name}: {statistics.median(on):.1f} tok/s with disk cache, {statistics.median(off):.1f} without: ratio "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--code-cache", type=Path)
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_SECONDS)  # the value that the server sets
    with tempfile.TemporaryDirectory(prefix="disk-cost-") as scratch:
        folder = Path(scratch)
        on, off = (load(arguments.model, it, arguments.threads, arguments.code_cache) for it in (folder, None))
        for name, rate in (
            ("one stream", lambda engine: decode_rate(engine, arguments.tokens)),
            ("prompt", prefill_rate),
        ):
            rates: dict[ModelEngine, list[float]] = {on: [], off: []}
            for number in range(arguments.rounds):
                for engine in (on, off) if number % 2 else (off, on):
                    rates[engine].append(rate(engine))
                on.flush()
            print_ratio(name, rates[on], rates[off])
        for length in LENGTHS:
            print_restore_times(arguments.model, folder, length, arguments)


def print_restore_times(model: Path, folder: Path, length: int, arguments: argparse.Namespace) -> None:
    """Print the times to the first token of one prompt: computed, from disk in a newly loaded engine, and from the
    device.
    """
    prompt = random_prompt(length)
    first = load(model, folder, arguments.threads, arguments.code_cache)
    run(first, random_prompt(200), 2)
    _, (computed, *_) = run(first, prompt, 1)
    first.flush()
    second = load(model, folder, arguments.threads, arguments.code_cache)
    run(second, random_prompt(200), 2)
    request, (restored, *_) = run(second, prompt, 1)
    warm, (device, *_) = run(second, prompt, 1)
    size = second.state().counters.disk_read_bytes / 1e6
    print(
        f"{length} tokens: computed {1e3 * computed:.0f} ms, from disk {1e3 * restored:.1f} ms ({size:.0f} MB in "
        f"{1e3 * request.cache.restore_seconds:.1f} ms), on the device {1e3 * device:.1f} ms; cached tokens "
        f"{request.cache.disk} on disk, {warm.cache.device} on the device",
        flush=True,
    )


if __name__ == "__main__":
    main()
