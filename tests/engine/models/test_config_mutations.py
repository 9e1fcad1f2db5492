"""Damaged configurations: a model is refused with a typed error, or generates only tokens of its vocabulary.

The full run is `pytest tests/engine/models/test_config_mutations.py --mutations 10000`.
"""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.sampling_params import SamplingParams
from quant.errors import InglenookError
from tests.engine.models.family_checkpoints import make
from tests.support.json_mutations import mutated

NAMES = ("llama", "gemma3", "qwen2 window", "phi3 longrope", "lfm2")
OPTIONS = LoadOptions(backend="reference", context_length=64, threads=1, drafts=False)


def outcome(folder: Path) -> str:
    """Load the model and generate four tokens. Returns "refused", or the reason why the reply ended.

    A valid context length may also be too short for the prompt.
    """
    try:
        with open_checkpoint(folder) as checkpoint:
            engine = load_engine(checkpoint, OPTIONS)
        request = engine.request(tuple(range(20)), SamplingParams(temperature=0, max_tokens=4), frozenset())
    except InglenookError as error:
        assert error.message
        return "refused"
    engine.add(request)
    reasons = []
    while engine.has_work:
        reasons += [event.finish.name for event in engine.step() if event.finish is not None]
    engine.assert_empty()
    assert all(0 <= token_id < engine.vocab_size for token_id in request.output_ids)
    return reasons[0]


@pytest.mark.parametrize("name", NAMES)
def test_mutated_config_is_refused_or_gives_tokens_of_the_vocabulary(tmp_path: Path, name: str, mutations: int) -> None:
    make(tmp_path, name, "folder")
    path, rng = tmp_path / "config.json", random.Random(name)
    intact = json.loads(path.read_text())
    outcomes = Counter[str]()
    for _ in range(mutations // 10 // len(NAMES)):
        path.write_text(json.dumps(mutated(intact, rng)))
        outcomes[outcome(tmp_path)] += 1
    print(f"{name}: {dict(outcomes)}")
    assert outcomes["refused"] > 0
    assert outcomes["LENGTH"] > 0
