"""Models with recurrent layers in the engine: the log-probabilities of their replies are those of transformers.

Their states are forked, reordered by beams, moved to host memory and back, and read from files by another engine.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import Preemption
from engine.load_options import DiskOptions, LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.request import Request
from engine.sampling_params import BeamParams, SamplingParams
from tests.engine.models.family_checkpoints import FAMILIES, TinyModel, make
from tests.engine.models.test_family_engines import CONTEXT, HOST_BYTES, LENGTHS, RECURRENT, predictions, prompt

NAMES = [name for name in FAMILIES if name.startswith(RECURRENT)]
REPLY = 24


@pytest.fixture(autouse=True)
def _one_thread(_own_threads: None) -> None:
    """Use one thread: threads would wait for each other on tiny tensors."""
    torch.set_num_threads(1)


def load(tiny: TinyModel, folder: Path | None = None, preemption: Preemption = Preemption.AUTO) -> ModelEngine:
    options = LoadOptions(
        "reference",
        CONTEXT,
        threads=1,
        preemption=preemption,
        host_cache=HOST_BYTES if preemption is Preemption.SWAP else 0,
        fingerprint="00" * 32,
        disk=None if folder is None else DiskOptions(folder, 1 << 30),
    )
    with open_checkpoint(tiny.path) as checkpoint:
        return load_engine(checkpoint, options)


def run(running: ModelEngine, *families: list[Request]) -> dict[int, list[float]]:
    """Return the log-probabilities of each request's tokens. The requests of a family have the same prompt."""
    for family in families:
        running.add(*family)
    found: dict[int, list[float]] = {it.id: [] for family in families for it in family}
    while running.has_work:
        for event in running.step():
            if event.logprobs:
                found[event.request_id].append(event.logprobs.logprob)
    return found


def check(tiny: TinyModel, it: Request, logprobs: list[float]) -> None:
    """Check the log-probabilities of a reply against transformers."""
    wanted = predictions(tiny, it, CONTEXT).log_softmax(-1).gather(1, torch.tensor(it.output_ids).unsqueeze(1))
    torch.testing.assert_close(torch.tensor(logprobs), wanted.squeeze(1), rtol=0, atol=1e-4)


def check_different(tiny: TinyModel, running: ModelEngine, family: list[Request]) -> None:
    """Check four different replies to one prompt against transformers."""
    found = run(running, family)
    assert len({tuple(it.output_ids) for it in family}) == 4
    for it in family:
        check(tiny, it, found[it.id])


def greedy(running: ModelEngine, ids: tuple[int, ...]) -> Request:
    return running.request(
        ids, SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True, logprobs=0), frozenset()
    )


@pytest.mark.share(2)
@pytest.mark.parametrize("name", NAMES)
def test_forked_replies_continue_from_one_state(tmp_path: Path, name: str) -> None:
    tiny = make(tmp_path, name, "folder")
    running = load(tiny)
    params = SamplingParams(temperature=3, max_tokens=REPLY, ignore_eos=True, logprobs=0)
    family = [running.request(prompt(21), replace(params, seed=seed), frozenset()) for seed in range(4)]
    check_different(tiny, running, family)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", NAMES)
def test_beams_continue_from_their_own_states(tmp_path: Path, name: str) -> None:
    tiny = make(tmp_path, name, "folder")
    running = load(tiny)
    params = SamplingParams(beams=BeamParams(4, 4), max_tokens=10, ignore_eos=True, logprobs=0)
    check_different(tiny, running, running.search(prompt(21), params, frozenset()))


@pytest.mark.share(2)
@pytest.mark.parametrize("name", NAMES)
def test_states_survive_a_swap_to_host_memory(tmp_path: Path, name: str) -> None:
    tiny = make(tmp_path, name, "folder")
    running = load(tiny, preemption=Preemption.SWAP)
    requests = [greedy(running, prompt(length)) for length in (*LENGTHS, 33, 35)]
    found = run(running, *([it] for it in requests))
    assert running.state().counters.swapped_out > 0
    for it in requests:
        check(tiny, it, found[it.id])


@pytest.mark.share(2)
@pytest.mark.parametrize("name", NAMES)
def test_states_in_files_continue_a_reply_in_another_engine(tmp_path: Path, name: str) -> None:
    tiny = make(tmp_path, name, "folder")
    first = load(tiny, tmp_path / "kv")
    before = greedy(first, prompt(40))
    run(first, [before])
    first.flush()
    second = load(tiny, tmp_path / "kv")
    after = greedy(second, (*before.prompt_ids, *before.output_ids, 5))
    found = run(second, [after])
    assert after.cache.disk == 48  # the last full block of the first 63 tokens
    check(tiny, after, found[after.id])
