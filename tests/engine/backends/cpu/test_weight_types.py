"""Whole models of every block type, and of mixes that occur in files, against the reference kernels."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.device import CpuStep
from tests.engine.backends.cpu.recorded import advance, compute, load_step, sequence
from tests.engine.backends.cpu.test_logprobs import CONFIG, logprobs, reference
from tests.support.random_gguf import SIZES, TYPES, write
from tests.support.weight_mixes import Q4_K_M

VOCABULARY = SIZES["tiny"].vocabulary
IDS = [(7 * index + 3) % VOCABULARY for index in range(40)]


MOST = {8: 0.03, 14: 0.003}  # largest distance to the reference kernels, by the number of bits of activations


@pytest.fixture(scope="module", params=[*TYPES, Q4_K_M])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write(out, request.param, SIZES["tiny"])
    return out


@pytest.fixture(scope="module")
def plain(path: Path) -> Tensor:
    """Return the log-probabilities of IDS by the reference kernels."""
    return logprobs(reference(path), IDS, VOCABULARY)


@pytest.fixture(scope="module", params=[8, 14])
def bits(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(scope="module")
def step(path: Path, cpu_kernels: Path, bits: int) -> CpuStep:
    return load_step(path, cpu_kernels, CONFIG, activation_bits=bits)


@pytest.mark.share(16)
def test_model_of_each_type_is_close_to_the_reference(step: CpuStep, plain: Tensor, bits: int) -> None:
    ours = logprobs(step, IDS, VOCABULARY)
    assert plain.std() > 0.1  # the model is not trivial
    assert (ours - plain).square().mean().sqrt() < MOST[bits]
    alone = torch.cat([logprobs(step, IDS[:count], VOCABULARY)[-1:] for count in (1, 2, 17, 40)])
    assert torch.equal(alone, ours[[0, 1, 16, 39]])


@pytest.mark.share(16)
def test_logits_do_not_depend_on_the_requested_rows(step: CpuStep) -> None:
    """The batch has two prompts and a single token. One thread and several threads give the same bits."""
    parts = [
        (sequence(0, IDS, [1, 2, 3]), len(IDS)),
        (sequence(1, IDS[7:], [4, 5]), 20),
        (sequence(2, IDS[3:], [6]), 1),
    ]
    batch = advance(parts, vocab_size=VOCABULARY, num_blocks=CONFIG.num_blocks)
    together = compute(step, batch)
    for wanted in ([60], [0], [39], [39, 59, 60], [2, 40, 41], [60, 3, 3], [], list(range(5, 61))):
        for threads in (1, CONFIG.threads):
            assert torch.equal(compute(step, replace(batch, logit_rows=wanted), threads), together[wanted]), wanted
