"""Measure how much a grammar slows down generation: `python -m tests.bench.grammar_cost MODEL.gguf`.

All streams of an engine are either free or constrained to a schema whose only value is a long list of objects with
short texts, so that almost every token has many alternatives. Rounds with and without the constraint alternate. The
report lists the tokens per second of both, and the median of their ratios.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path

from app.generation.conversation import Json
from app.generation.grammars import GrammarCompiler, GrammarSource
from app.text.gguf_tokenizer import from_gguf
from engine.grammar import Grammar
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.sampling_params import SamplingParams
from quant.gguf import GGUFFile

SCHEMA: Json = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 3, "maxLength": 30}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
}


def tokens_per_second(
    engine: ModelEngine, streams: int, tokens: int, temperature: float, grammar: Grammar | None
) -> float:
    params = SamplingParams(temperature=temperature, max_tokens=tokens, grammar=grammar, ignore_eos=True)
    for number in range(streams):
        engine.add(engine.request((1, 17 + number, 42), params, frozenset()))
    generated, began = 0, time.perf_counter()
    while engine.has_requests:
        generated += sum(event.token_id is not None for event in engine.step())
    return generated / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=1.0)
    arguments = parser.parse_args()
    with GGUFFile(arguments.model) as file:
        compiler = GrammarCompiler(from_gguf(file.metadata))
    grammar = asyncio.run(compiler.compile(GrammarSource.schema(SCHEMA)))
    with open_checkpoint(arguments.model) as checkpoint:
        engine = load_engine(checkpoint, LoadOptions(context_length=2048))
    ratios = []
    for number in range(arguments.rounds + 1):
        free, constrained = (
            tokens_per_second(engine, arguments.streams, arguments.tokens, arguments.temperature, it)
            for it in (None, grammar)
        )
        if number:  # the first round is a warm-up
            ratios.append(constrained / free)
            print(f"free {free:7.0f}   constrained to a schema {constrained:7.0f}   ratio {constrained / free:.3f}")
    print(f"median of {arguments.rounds}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
