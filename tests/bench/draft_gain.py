"""Measure what drafts gain and cost: `python -m tests.bench.draft_gain MODEL.gguf`, on an idle machine.

Each workload runs in pairs of rounds, with drafts and without, in alternating order and on one engine. The replies of a
pair are the same. The report has the median of the ratios of decode speed, and the tokens drafted and accepted.

- prose: drawn replies to questions, in which little repeats;
- wrong: the same, but every drafted token is wrong;
- streams: 16 replies at a time;
- edit: the reply repeats a file from the prompt, with one change;
- agent: the reply repeats the result of a tool, with other values;
- again: the reply of an earlier request is generated again;
- records: a JSON schema of a list of records with the same keys;
- records-wrong: the same, but every drafted token is wrong;
- records-streams: 8 such replies at a time, of 4 questions.

With `--beside`, the report has the milliseconds between the tokens of a reply without drafts (p99) while `edit` runs
beside it, with drafts and without.

The replies of `edit` and `agent` are given: small models do not follow such requests. The model computes as usual, and
its choice is replaced by the next token of the given reply.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from app.bench.sample import percentile
from app.generation.grammars import GrammarCompiler, GrammarSource
from app.text.gguf_tokenizer import from_gguf
from engine.draft import NO_DRAFTS, Draft, DraftCounts
from engine.drafting.drafter import Drafter
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.request import Origin, Request
from engine.sampling.drawing import Logits
from engine.sampling.masks import NO_MASKS, Masks
from engine.sampling.sampler import next_tokens
from engine.sampling_params import SamplingParams
from engine.step import SampledToken
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
EDITED = f"```python\n{FILE.replace('def titles', 'def headings')}```"
ORDERS = ",\n".join(
    f'  {{"order": {number}, "customer": "{name}", "status": "shipped", "total_eur": {total}.50}}'
    for number, name, total in (
        (4711, "Ines Moreau", 120), (4712, "Jakob Lind", 85), (4713, "Aiko Tanaka", 240), (4714, "Omar Haddad", 64),
    )
)  # fmt: skip
AGENT = f"The tool list_orders returned:\n\n[\n{ORDERS}\n]\n\nCall set_orders with the status delivered for each."
ANSWER = f'{{"name": "set_orders", "arguments": {{"orders": [\n{ORDERS.replace("shipped", "delivered")}\n]}}}}'
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=LENGTH, ignore_eos=True, seed=1)
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
RECORDS = GrammarSource.schema(
    {
        "type": "array",
        "minItems": 50,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "height_in_meters": {"type": "integer"},
                "is_evergreen": {"type": "boolean"},
            },
            "required": ["name", "height_in_meters", "is_evergreen"],
            "additionalProperties": False,
        },
    }
)
TREES = tuple(f"List fifty trees of {place} as JSON." for place in ("Europe", "Asia", "Africa", "America"))


class WrongDrafts(Drafter):
    """Replaces every drafted token by a wrong one."""

    def _find(self, followed: Any) -> Draft:
        found = super()._find(followed)
        return replace(found, token_ids=tuple(1 + token_id // 2 for token_id in found.token_ids))


@dataclass(frozen=True)
class Workload:
    """Questions that are asked together, and how to draw the replies."""

    questions: Sequence[str]
    params: SamplingParams
    drafter: type[Drafter] = Drafter
    is_repeated: bool = False  # whether each round repeats the replies of the rounds before
    reply: str = ""  # the reply to every question; empty: the model's own
    grammar: GrammarSource | None = None


WORKLOADS: Mapping[str, Workload] = {
    "prose": Workload(QUESTIONS[:1], DRAWN),
    "wrong": Workload(QUESTIONS[:1], DRAWN, WrongDrafts),
    "streams": Workload(QUESTIONS * 4, DRAWN),
    "edit": Workload([EDIT], GREEDY, reply=EDITED),
    "agent": Workload([AGENT], GREEDY, reply=ANSWER),
    "again": Workload(QUESTIONS[:1], DRAWN, is_repeated=True),
    "records": Workload(TREES[:1], DRAWN, grammar=RECORDS),
    "records-wrong": Workload(TREES[:1], DRAWN, WrongDrafts, grammar=RECORDS),
    "records-streams": Workload(TREES * 2, DRAWN, grammar=RECORDS),
}


class Bench:
    """One engine, and the drafts that its requests had."""

    def __init__(self, engine: ModelEngine, encode: Callable[[str], Sequence[int]], compiler: GrammarCompiler) -> None:
        self._engine = engine
        self._encode = encode
        self._compiler = compiler
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
        grammar = asyncio.run(self._compiler.compile(workload.grammar)) if workload.grammar else None
        params = replace(workload.params, drafts=drafts, seed=seed, grammar=grammar)
        reply = self._encode(workload.reply)
        if reply:
            params = replace(params, max_tokens=len(reply))
        requests = [
            self._engine.request(
                tuple(self._encode(QUESTION.format(question))),
                params,
                frozenset(),
                Origin(cache_salt=salt),
            )
            for question in workload.questions
        ]
        with giving(reply) if reply else nullcontext():
            return requests, self._decode(requests)

    def _decode(self, requests: Sequence[Request]) -> float:
        """Run the requests, and return the tokens per second after all have their first token."""
        self._engine.add(*requests[:1])
        for request in requests[1:]:
            self._engine.add(request)
        while any(not request.output_ids for request in requests):
            self._engine.step()
        known, began = sum(len(request.output_ids) for request in requests), time.perf_counter()
        while self._engine.has_requests:
            self._engine.step()
        generated = sum(len(request.output_ids) for request in requests) - known
        return generated / (time.perf_counter() - began)

    def gap_beside(self, workload: Workload, *, drafts: bool) -> float:
        """Return the p99 of the milliseconds between the tokens of another reply, which has no drafts."""
        reply = self._encode(workload.reply)
        params, salt = replace(workload.params, drafts=drafts, max_tokens=len(reply)), str(next(self._salts))
        drafting, other = (
            self._engine.request(
                tuple(self._encode(QUESTION.format(question))), chosen, frozenset(), Origin(cache_salt=salt)
            )
            for question, chosen in ((workload.questions[0], params), (QUESTIONS[0], replace(params, drafts=False)))
        )
        times: list[float] = []
        with giving(reply):
            self._engine.add(drafting)
            self._engine.add(other)
            while len(drafting.output_ids) < len(reply):
                known = len(other.output_ids)
                self._engine.step()
                times += [time.perf_counter()] * (len(other.output_ids) - known)
            while self._engine.has_requests:
                self._engine.step()
        return 1000 * percentile([late - early for early, late in itertools.pairwise(times)], 0.99)


def giving(reply: Sequence[int]) -> AbstractContextManager[object]:
    """Return a context in which every request gets this reply, independent of its logits."""

    def given(
        logits: Logits, rows: Sequence[int], requests: Sequence[Request], masks: Masks = NO_MASKS
    ) -> list[SampledToken]:
        tokens = next_tokens(logits, rows, requests, masks)
        at = [min(len(request.output_ids), len(reply) - 1) for request in requests]
        return [replace(token, token_id=reply[index]) for token, index in zip(tokens, at, strict=True)]

    return patch("engine.backends.runner.next_tokens", given)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--beside", action="store_true")
    arguments = parser.parse_args()
    with GGUFFile(arguments.model) as file:
        tokenizer = from_gguf(file.metadata)
    with open_checkpoint(arguments.model) as checkpoint:
        engine = load_engine(checkpoint, LoadOptions(context_length=2048))
    bench = Bench(engine, lambda text: tokenizer.encode(text, parse_special=True), GrammarCompiler(tokenizer))
    if arguments.beside:
        for number in range(arguments.rounds):
            gaps = {drafts: bench.gap_beside(WORKLOADS["edit"], drafts=drafts) for drafts in (False, True)}
            print(f"round {number}: {gaps[False]:.1f} ms without drafts, {gaps[True]:.1f} ms with", flush=True)
        return
    for name in arguments.only:
        workload = WORKLOADS[name]
        engine._scheduler._verification.drafter = workload.drafter(engine._scheduler.costs.steps.small.expected)
        bench.ratio(workload, 0, drafts_first=False)  # measures the steps, and stores the reply to repeat
        found = [bench.ratio(workload, number, drafts_first=number % 2 == 0) for number in range(arguments.rounds)]
        ratios, counts = sorted(ratio for ratio, _ in found), sum((it for _, it in found), NO_DRAFTS)
        print(
            f"{name:16} {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}),"
            f" {counts.accepted} of {counts.drafted} drafted tokens accepted",
            flush=True,
        )


if __name__ == "__main__":
    main()
