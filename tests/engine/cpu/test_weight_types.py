"""Whole models of every block type, and of several mixed as files have them, next to the plain kernels."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.cpu.device import CpuStep
from tests.engine.cpu.recorded import advance, compute, load_step, sequence
from tests.engine.cpu.test_logprobs import CONFIG, logprobs, reference
from tests.random_gguf import SIZES, TYPES, write
from tests.weight_mixes import Q4_K_M

VOCABULARY = SIZES["tiny"].vocabulary
IDS = [(7 * place + 3) % VOCABULARY for place in range(40)]


@pytest.fixture(params=[*TYPES, Q4_K_M])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    out = tmp_path / "tiny.gguf"
    write(out, request.param, SIZES["tiny"])
    return out


@pytest.mark.parametrize(("planes", "most"), [(1, 0.03), (2, 0.003)])
def test_a_model_is_near_the_plain_kernels(path: Path, cpu_kernels: Path, planes: int, most: float) -> None:
    step: CpuStep = load_step(path, cpu_kernels, CONFIG, planes=planes)
    ours, plain = logprobs(step, IDS, VOCABULARY), logprobs(reference(path), IDS, VOCABULARY)
    assert plain.std() > 0.1  # there is something to get wrong
    assert (ours - plain).square().mean().sqrt() < most
    alone = torch.cat([logprobs(step, IDS[:count], VOCABULARY)[-1:] for count in (1, 2, 17, 40)])
    assert torch.equal(alone, ours[[0, 1, 16, 39]])


@pytest.mark.parametrize("planes", [1, 2])
def test_logits_are_the_same_whichever_are_wanted(path: Path, cpu_kernels: Path, planes: int) -> None:
    """Two prompts and a single token, by any number of threads."""
    step: CpuStep = load_step(path, cpu_kernels, CONFIG, planes=planes)
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
