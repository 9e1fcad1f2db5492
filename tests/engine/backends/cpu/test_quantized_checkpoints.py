"""Whole checkpoints of every quantization format on the CPU device, against the reference kernels."""

import logging
from pathlib import Path

import pytest
import torch

from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from tests.engine.backends.cpu.recorded import load_step
from tests.engine.backends.cpu.test_logprobs import CONFIG, logprobs, reference
from tests.engine.checkpoints.quantized_folders import KINDS, quantized_folder
from tests.quant.checkpoint_layers import pack_quantized_layer

VOCABULARY = 97
IDS = [(7 * index + 3) % VOCABULARY for index in range(40)]


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_model_is_close_to_the_reference(tmp_path: Path, cpu_kernels: Path, kind: str) -> None:
    path = quantized_folder(tmp_path, kind).path
    plain = logprobs(reference(path), IDS, VOCABULARY)
    # Random integer weights give scores in the hundreds, which amplify the rounding of activations. A wrong kernel
    # would differ by 1 or more.
    for bits, most in ((8, 0.3), (14, 0.05)):
        step = load_step(path, cpu_kernels, CONFIG, activation_bits=bits)
        ours = logprobs(step, IDS, VOCABULARY)
        assert (ours - plain).square().mean().sqrt() < most * plain.std()
        alone = torch.cat([logprobs(step, IDS[:count], VOCABULARY)[-1:] for count in (1, 2, 17, 40)])
        assert torch.equal(alone, ours[[0, 1, 16, 39]])


def test_unsupported_layout_uses_the_reference_kernels(
    tmp_path: Path, cpu_kernels: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "odd", lambda rng, m, n: pack_quantized_layer(rng, m, n, 16))
    path = quantized_folder(tmp_path, "odd").path
    with open_checkpoint(path) as checkpoint, caplog.at_level(logging.WARNING):
        assert load_engine(checkpoint, LoadOptions(code_cache=cpu_kernels)).config.backend == "reference"
    assert "CT-INT4 weights in groups of 16 columns" in caplog.text
