"""Whole models of every block type, and of several mixed as files have them, next to the plain kernels."""

from pathlib import Path

import pytest
import torch

from engine.cpu.device import CpuStep
from tests.engine.cpu.recorded import load_step
from tests.engine.cpu.test_logprobs import CONFIG, logprobs, reference
from tests.random_gguf import Q4_K_M, SIZES, TYPES, write

VOCABULARY = SIZES["tiny"].vocabulary
IDS = [(7 * place + 3) % VOCABULARY for place in range(40)]


@pytest.fixture(params=[*TYPES, Q4_K_M])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    out = tmp_path / "tiny.gguf"
    write(out, request.param, SIZES["tiny"])
    return out


def test_a_model_is_near_the_plain_kernels(path: Path, cpu_kernels: Path) -> None:
    step: CpuStep = load_step(path, cpu_kernels, CONFIG)
    ours, plain = logprobs(step, IDS, VOCABULARY), logprobs(reference(path), IDS, VOCABULARY)
    assert plain.std() > 0.1  # there is something to get wrong
    assert (ours - plain).square().mean().sqrt() < 0.003
    alone = torch.cat([logprobs(step, IDS[:count], VOCABULARY)[-1:] for count in (1, 2, 17, 40)])
    assert torch.equal(alone, ours[[0, 1, 16, 39]])
