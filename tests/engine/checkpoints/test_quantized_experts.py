"""Mixtures of experts in every quantization format, in a folder with a matrix per expert."""

from pathlib import Path

import pytest
import torch

from tests.engine.backends.cpu.recorded import load_step
from tests.engine.backends.cpu.test_logprobs import CONFIG, logprobs, reference
from tests.engine.backends.cuda.two_devices import TwoDevices, check_close, gpu
from tests.engine.checkpoints.quantized_experts import quantized_experts
from tests.engine.checkpoints.quantized_folders import KINDS
from tests.engine.checkpoints.test_quantized_checkpoints import load
from tests.engine.models.test_llama import forward, poisoned_cache, request

VOCABULARY = 97
IDS = [(7 * index + 3) % VOCABULARY for index in range(40)]


@pytest.mark.share(4)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_dequantized_experts(tmp_path: Path, kind: str) -> None:
    made = quantized_experts(tmp_path, kind)
    with torch.inference_mode():
        expected = made.reference(torch.tensor([IDS])).logits[0, -1]
    model = load(made.path, keep_dequantized=True)
    logits = forward(model, poisoned_cache(model), [(request(1, IDS, range(1, 5)), 40)])
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


# Here the columns of gate and up are in different random orders. Quantizers order them by the same inputs.
ORDERED = ("GPTQ, desc_act", "pack-quantized, by activations")


@pytest.mark.share(4)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ORDERED])
def test_cpu_kernels_are_close_to_the_reference(tmp_path: Path, cpu_kernels: Path, kind: str) -> None:
    path = quantized_experts(tmp_path, kind).path
    plain, step = logprobs(reference(path), IDS, VOCABULARY), load_step(path, cpu_kernels, CONFIG, activation_bits=14)
    ours = logprobs(step, IDS, VOCABULARY)
    assert (ours - plain).square().mean().sqrt() < 0.005 * plain.std()
    alone = torch.cat([logprobs(step, IDS[:count], VOCABULARY)[-1:] for count in (1, 2, 17, 40)])
    assert torch.equal(alone, ours[[0, 1, 16, 39]])


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_kernels_are_close_to_the_reference(tmp_path: Path, kind: str, device: torch.device) -> None:
    check_close(*TwoDevices.of(quantized_experts(tmp_path, kind).path, gpu(device)).prefill_and_decode())
