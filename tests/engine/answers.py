"""An engine's answer to a fixed prompt, for tests that compare ways of loading a model."""

from pathlib import Path

from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.sampling_params import SamplingParams


def answer(path: Path, options: LoadOptions) -> tuple[str, list[int]]:
    """Return the chosen backend and eight greedy tokens."""
    with open_checkpoint(path) as checkpoint:
        engine = load_engine(checkpoint, options)
    request = engine.request(tuple(range(30)), SamplingParams(temperature=0, max_tokens=8), frozenset())
    engine.add(request)
    while engine.has_work:
        engine.step()
    return engine.config.backend, request.output_ids
