"""Measure what drafts gain and cost: `python -m tests.bench.draft_gain MODEL.gguf`, on an idle machine.

Each workload runs in pairs of rounds, with drafts and without, in alternating order and on one engine. The replies of a
pair are the same. The report has the median of the ratios of decode speed, and the tokens drafted and accepted.

- prose: drawn replies to questions, in which little repeats;
- wrong: the same, but every drafted token is wrong;
- streams: 16 replies at a time;
- edit: the reply repeats a file from the prompt, with one change;
- again: the reply of an earlier request is generated again.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.text.gguf_tokenizer import from_gguf
from engine.draft import NO_DRAFTS, Draft, DraftCounts
from engine.drafting.drafter import Drafter
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.request import Origin, Request
from engine.sampling_params import SamplingParams
from quant.gguf import GGUFFile

LENGTH = 200  # tokens of a reply
QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = (
    "Tell me a story about a lighthouse keeper and a storm.",
    "Why do cats sleep so long?",
    "Describe a market in a small town on a cold morning.",
    "What should I see on a first visit to Lisbon?",
)
FILE = "\n".join(
    f'def {name}(path: str, limit: int = {number}) -> list[str]:\n    """Return the {name} of a file."""\n'
    f"    with open(path) as file:\n        return [line.strip() for line in file][:limit]\n"
    for number, name in enumerate(("headers", "titles", "names", "notes"), 10)
)
EDIT = f"Repeat this file, but call the function titles headings.\n\n```python\n{FILE}```"
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=LENGTH, ignore_eos=True, seed=1)
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


class WrongDrafts(Drafter):
    """Replaces every drafted token by a wrong one."""

    def draft(self, request: Request) -> Draft:
        found = super().draft(request)
        return replace(found, token_ids=tuple(1 + token_id // 2 for token_id in found.token_ids))


@dataclass(frozen=True)
class Workload:
    """Questions that are asked together, and how to draw the replies."""

    questions: Sequence[str]
    params: SamplingParams
    drafter: type[Drafter] = Drafter
    is_repeated: bool = False  # whether each round repeats the replies of the rounds before


WORKLOADS: Mapping[str, Workload] = {
    "prose": Workload(QUESTIONS[:1], DRAWN),
    "wrong": Workload(QUESTIONS[:1], DRAWN, WrongDrafts),
    "streams": Workload(QUESTIONS * 4, DRAWN),
    "edit": Workload([EDIT], GREEDY),
    "again": Workload(QUESTIONS[:1], DRAWN, is_repeated=True),
}


class Bench:
    """One engine, and the drafts that its requests had."""

    def __init__(self, engine: ModelEngine, encode: Callable[[str], Sequence[int]]) -> None:
        self._engine = engine
        self._encode = encode
        self._salts = itertools.count()

    def ratio(self, workload: Workload, number: int, *, drafts_first: bool) -> tuple[float, DraftCounts]:
        """Return the speed with drafts divided by the speed without, and what was drafted."""
        speeds: dict[bool, float] = {}
        counts = NO_DRAFTS
        for drafts in (drafts_first, not drafts_first):
            requests, speeds[drafts] = self._run(workload, number, drafts=drafts)
            counts = sum((request.drafts for request in requests), counts)
        return speeds[True] / speeds[False], counts

    def _run(self, workload: Workload, number: int, *, drafts: bool) -> tuple[list[Request], float]:
        """Return the requests, and their tokens per second after all have their first token."""
        salt = "again" if workload.is_repeated else str(next(self._salts))
        seed = workload.params.seed + number * (not workload.is_repeated)
        params = replace(workload.params, drafts=drafts, seed=seed)
        requests = [
            self._engine.request(
                tuple(self._encode(QUESTION.format(question))),
                params,
                frozenset(),
                Origin(cache_salt=salt),
            )
            for question in workload.questions
        ]
        self._engine.add(*requests[:1])
        for request in requests[1:]:
            self._engine.add(request)
        while any(not request.output_ids for request in requests):
            self._engine.step()
        known, began = sum(len(request.output_ids) for request in requests), time.perf_counter()
        while self._engine.has_requests:
            self._engine.step()
        generated = sum(len(request.output_ids) for request in requests) - known
        return requests, generated / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    arguments = parser.parse_args()
    with GGUFFile(arguments.model) as file:
        tokenizer = from_gguf(file.metadata)
    with open_checkpoint(arguments.model) as checkpoint:
        engine = load_engine(checkpoint, LoadOptions(context_length=2048))
    bench = Bench(engine, lambda text: tokenizer.encode(text, parse_special=True))
    for name in arguments.only:
        workload = WORKLOADS[name]
        engine._scheduler._verification.drafter = workload.drafter(engine._scheduler.costs.steps.small.expected)
        bench.ratio(workload, 0, drafts_first=False)  # measures the steps, and stores the reply to repeat
        found = [bench.ratio(workload, number, drafts_first=number % 2 == 0) for number in range(arguments.rounds)]
        ratios, counts = sorted(ratio for ratio, _ in found), sum((it for _, it in found), NO_DRAFTS)
        print(
            f"{name:8} {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}),"
            f" {counts.accepted} of {counts.drafted} drafted tokens accepted",
            flush=True,
        )


if __name__ == "__main__":
    main()
