"""Sampling when the device has already found the most likely tokens: which requests read logits."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.device import CpuStep
from engine.backends.runner import ModelRunner
from engine.batch import build_batch
from engine.config import EngineConfig
from engine.device import LoadedModel
from engine.sampling.drawing import Logits
from engine.sampling.sampler import next_tokens, sample
from engine.sampling_params import SamplingParams
from engine.step import SampledToken, StepPlan
from tests.engine.backends.cpu.recorded import load_step
from tests.engine.models.tiny_llama import MIXES, make
from tests.support.held_request import HeldRequest

SEED = 19
VOCABULARY = 97
CONFIG = EngineConfig("cpu", context_length=64, num_blocks=100, max_step_tokens=200, max_running=16, threads=2)

PLAIN = SamplingParams(temperature=0)
# Parameters each of which makes a request read logits.
SHAPED = {
    "drawn": SamplingParams(temperature=1.0, seed=5),
    "penalty": SamplingParams(temperature=0, repetition_penalty=1.5),
    "presence": SamplingParams(temperature=0, presence_penalty=2.0),
    "frequency": SamplingParams(temperature=0, frequency_penalty=2.0),
    "bias": SamplingParams(temperature=0, logit_bias=((11, 100.0),)),
    "min_tokens": SamplingParams(temperature=0, min_tokens=3),
    "logprobs": SamplingParams(temperature=0, logprobs=2),
}
KINDS = [PLAIN, PLAIN, *SHAPED.values()]


def request(number: int, params: SamplingParams = PLAIN, ids: Sequence[int] = (1, 2, 3)) -> HeldRequest:
    blocks = list(range(1 + 4 * number, 5 + 4 * number))
    return HeldRequest(number, tuple(ids), params, frozenset(range(40)), block_tables=(blocks,))


class Unreadable:
    """Logits that fail the test when read."""

    def __getitem__(self, rows: object) -> Tensor:
        raise AssertionError("logits were read")


def test_plain_greedy_requests_read_no_logits() -> None:
    logits = Logits(Unreadable(), [7, 8, 9, 10])  # type: ignore[arg-type]
    found = next_tokens(logits, [2, 0], [request(1), request(2)])
    assert found == [SampledToken(1, 9), SampledToken(2, 7)]
    assert next_tokens(logits, [], []) == []


@pytest.mark.parametrize("shape", SHAPED)
def test_requests_that_are_not_plain_greedy_read_logits(shape: str) -> None:
    values = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(SEED))
    wrong = Logits(values, [0, 0, 0, 0])  # the tokens 0 of the device are wrong and must not be used
    (found,) = next_tokens(wrong, [2], [request(1, SHAPED[shape])])
    (expected,) = sample(values[2:3], [request(1, SHAPED[shape])])
    assert found == expected
    assert found.token_id != 0


@pytest.mark.parametrize("seed", range(5))
def test_mixed_batch_returns_tokens_in_order(seed: int) -> None:
    """Each request gets the token it would get alone, from the device's tokens or from logits."""
    rng = random.Random(seed)
    values = torch.randn(12, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    logits = Logits(values, values.argmax(-1).tolist())
    kinds = [rng.choice(KINDS) for _ in range(8)]
    requests, rows = [request(number, kind) for number, kind in enumerate(kinds)], rng.sample(range(12), 8)
    together = next_tokens(logits, rows, requests)
    assert [token.request_id for token in together] == list(range(8))
    for index, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        alone = next_tokens(logits, [row], [request(index, kind)])
        assert alone == [together[index]]
        assert alone == next_tokens(Logits(values), [row], [request(index, kind)])


# -- on the CPU device


@pytest.fixture(scope="module")
def step(cpu_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> CpuStep:
    folder = tmp_path_factory.mktemp("tiny")
    path = make(folder, heads=2, kv_heads=1, head_dim=32, hidden=64, vocab=VOCABULARY, types=MIXES["Q8_0"]).path
    return load_step(path, cpu_kernels, CONFIG)


def plan_of(rng: random.Random, count: int) -> StepPlan:
    """Return a plan of parts that sample, report prompt log-probabilities, do both, or neither."""
    parts = []
    for number in range(count):
        ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 20))]
        reports, samples = rng.random() < 0.3, rng.random() < 0.7
        it = request(number, replace(rng.choice(KINDS), prompt_logprobs=1 if reports else None), ids)
        stop = len(ids) if samples else len(ids) - 1
        positions = range(min(stop, len(ids) - 1)) if reports else range(0)
        parts.append(it.part(0, stop, samples=samples, logprob_positions=positions))
    return StepPlan(tuple(parts))


@pytest.mark.parametrize("seed", range(6))
def test_device_argmax_equals_sampling_from_logits(step: CpuStep, seed: int) -> None:
    plan = plan_of(random.Random(seed), 8)
    runner = ModelRunner(LoadedModel(step, step._kv), VOCABULARY)
    ticket = runner.launch(plan)
    values = ticket.logits.values.clone()
    assert ticket.logits.greedy == values.argmax(-1).tolist()
    reading = ModelRunner(LoadedModel(lambda batch: Logits(values), step._kv), VOCABULARY)
    found = runner.collect(ticket)
    assert found == reading.collect(reading.launch(plan))
    for part in plan.scheduled:
        told = [token for token in found if token.request_id == part.request.id]
        assert len(told) == (1 if part.samples or part.logprob_positions else 0)
        assert all((token.token_id is not None) == part.samples for token in told)
        assert sum(len(token.prompt_logprobs) for token in told) == len(part.logprob_positions)


def test_step_without_samples_computes_no_logits(step: CpuStep) -> None:
    it = request(1, ids=range(10))
    runner = ModelRunner(LoadedModel(step, step._kv), VOCABULARY)
    ticket = runner.launch(StepPlan((it.part(0, 7, samples=False),)))
    assert ticket.logits.values.shape == (0, VOCABULARY)
    assert ticket.logits.greedy == []
    assert runner.collect(ticket) == []


def test_logits_do_not_depend_on_the_requested_rows(step: CpuStep) -> None:
    """The logits of a row have the same bits if no other row is requested."""
    ids = [5, 9, 3, 77, 20, 41, 8]
    every = StepPlan((request(1, ids=ids).part(0, 7, logprob_positions=range(6)),))
    last = StepPlan((request(1, ids=ids).part(0, 7),))
    batches = [build_batch(plan, vocab_size=VOCABULARY, num_blocks=CONFIG.num_blocks) for plan in (every, last)]
    values = [step(batch).values.clone() for batch in batches]
    assert [len(rows) for rows in values] == [7, 1]
    assert torch.equal(values[0][6:], values[1])
