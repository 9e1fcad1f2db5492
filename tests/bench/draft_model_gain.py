"""Measure what a draft model gains and costs: `python -m tests.bench.draft_model_gain SMOLLM2.gguf`, when idle.

SmolLM2 135M drafts for two models of 1.7 billion weights, which are written to a temporary folder (2 GB):

- agreeing: a wider copy of SmolLM2, which nearly always agrees with its drafter;
- random: random weights, for which nearly every draft is wrong.

Each reply is generated with the draft model and without, in alternating order and on one engine. The two are compared,
and must be the same. The report has the median of the ratios of decode speed, and the tokens drafted and accepted.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from app.text.gguf_tokenizer import from_gguf
from engine.draft import DraftCounts
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_draft_model, load_engine, open_checkpoint
from engine.request import Origin
from engine.sampling_params import SamplingParams
from quant.gguf import GGUFFile
from tests.bench.draft_gain import QUESTION, QUESTIONS
from tests.support import random_gguf
from tests.support.widened_gguf import write_widened

LENGTH = 120  # tokens of a reply
SAMPLING: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.8, top_p=0.95, max_tokens=LENGTH, ignore_eos=True, seed=1),
}
SHAPE = random_gguf.Shape(24, 2048, 32, 32, 64, 8192, 49_152)  # that of SmolLM2 1.7B
MODELS: Mapping[str, Callable[[Path, Path], None]] = {
    "agreeing": write_widened,
    "random": lambda source, target: random_gguf.write(target, "Q4_1", SHAPE),
}


def decode(engine: ModelEngine, prompt: Sequence[int], params: SamplingParams, salt: str) -> tuple[list[int], float]:
    """Return the tokens of a reply, and their number per second after the first."""
    request = engine.request(tuple(prompt), params, frozenset(), Origin(cache_salt=salt))
    engine.add(request)
    while not request.output_ids:
        engine.step()
    began = time.perf_counter()
    while engine.has_requests:
        engine.step()
    return request.output_ids, (LENGTH - 1) / (time.perf_counter() - began)


def ratio(engine: ModelEngine, prompt: Sequence[int], params: SamplingParams, number: int) -> float:
    """Return the speed with drafts divided by the speed without."""
    replies: dict[bool, list[int]] = {}
    speeds: dict[bool, float] = {}
    for drafts in (number % 2 == 0, number % 2 != 0):
        asked = replace(params, drafts=drafts, seed=number)
        # A new salt, so that no reply is drafted from the one before.
        replies[drafts], speeds[drafts] = decode(engine, prompt, asked, f"{number} {drafts}")
    if replies[True] != replies[False]:
        raise RuntimeError("the reply with drafts differs")
    return speeds[True] / speeds[False]


def drafted(engine: ModelEngine) -> DraftCounts:
    counts = engine.state().counters.drafts.values()
    return sum(counts, DraftCounts())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    with GGUFFile(arguments.model) as file:
        tokenizer = from_gguf(file.metadata)
    prompts = [tokenizer.encode(QUESTION.format(question), parse_special=True) for question in QUESTIONS]
    options = LoadOptions(context_length=2048)
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{name}.gguf")
            MODELS[name](arguments.model, path)
            with open_checkpoint(path) as target, open_checkpoint(arguments.model) as draft:
                engine = load_engine(target, options)
                engine.draft_with(load_draft_model(draft, options, engine))
        for kind, params in SAMPLING.items():
            ratio(engine, prompts[0], params, arguments.rounds)  # measures the steps
            before = drafted(engine)
            ratios = sorted(ratio(engine, prompts[it % len(prompts)], params, it) for it in range(arguments.rounds))
            after = drafted(engine)
            print(
                f"{name:8} {kind:6} {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), "
                f"{after.accepted - before.accepted} of {after.drafted - before.drafted} drafted tokens accepted",
                flush=True,
            )


if __name__ == "__main__":
    main()
