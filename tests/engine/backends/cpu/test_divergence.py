"""Kullback-Leibler divergence of the CPU kernels from the float32 reference, on a random half of the license text."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.text.gguf_tokenizer import from_gguf
from engine import models
from engine.backends.cpu.device import CpuDevice
from engine.backends.reference import ReferenceDevice
from engine.batch import build_batch
from engine.checkpoints.weights import Weights
from engine.config import BLOCK_SIZE, EngineConfig
from engine.device import Compute, Device
from engine.loading import open_checkpoint
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from quant.cpu.tiers import choose
from quant.kernels import reference
from tests.support.held_request import HeldRequest

WINDOW = 512
BLOCKS = WINDOW // BLOCK_SIZE
WINDOWS = 2
# llama.cpp's result on the same text and file (llama-perplexity --kl-divergence). Like that tool, this test counts only
# the second half of each window, where every token has some context.
LLAMA_CPP = 0.0034


def compute_with(device: Device, path: Path) -> Compute:
    with open_checkpoint(path) as checkpoint:
        config = models.read_config(checkpoint.metadata)
        limits = EngineConfig(device.name, WINDOW, BLOCKS + 1, max_step_tokens=WINDOW, max_running=1)
        return device.load(config, Weights(checkpoint.path, models.stored_weights(checkpoint)), limits).compute


def logprobs(compute: Compute, token_ids: list[int]) -> Tensor:
    """Return the log-probabilities of the second half of the positions, float64 [WINDOW / 2, vocabulary]."""
    request = HeldRequest(1, tuple(token_ids), SamplingParams(), block_tables=(list(range(1, BLOCKS + 1)),))
    plan = StepPlan((request.part(0, len(token_ids)),))
    batch = build_batch(plan, vocab_size=49152, num_blocks=BLOCKS + 1)
    values = compute(replace(batch, logit_rows=range(WINDOW // 2, WINDOW))).values
    return torch.log_softmax(values.double(), -1)


@pytest.fixture(scope="module")
def window(smollm2: Path, seed: int) -> list[int]:
    text = (Path(__file__).parents[4] / "LICENSE").read_text(encoding="utf-8")
    with open_checkpoint(smollm2) as checkpoint:
        token_ids = from_gguf(checkpoint.metadata.values).encode(text)
    start = seed % WINDOWS * WINDOW
    return list(token_ids[start : start + WINDOW])


@pytest.fixture(scope="module")
def expected(smollm2: Path, window: list[int]) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "ROW_TILE", WINDOW)  # much faster; here the bits of a row may depend on the batch
        return logprobs(compute_with(ReferenceDevice(keep_dequantized=True, threads=1), smollm2), window)


# (bits of activations, KV type, largest divergence)
CASES = [(14, torch.float16, LLAMA_CPP / 100), (8, torch.float16, LLAMA_CPP), (14, torch.int8, LLAMA_CPP)]


@pytest.mark.share(1)
@pytest.mark.parametrize(("bits", "kv_type", "limit"), CASES)
def test_divergence_from_the_reference_is_below_the_limit(
    smollm2: Path,
    cpu_kernels: Path,
    window: list[int],
    expected: Tensor,
    bits: int,
    kv_type: torch.dtype,
    limit: float,
) -> None:
    compute = compute_with(CpuDevice(2, bits, choose("auto"), cpu_kernels, kv_type), smollm2)
    ours = logprobs(compute, window)
    mean = float((expected.exp() * (expected - ours)).sum(-1).mean())
    print(f"{bits} bits, {kv_type}: mean Kullback-Leibler divergence {mean:.5f} a token")
    assert mean < limit
