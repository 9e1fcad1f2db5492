"""Checkpoints of every quantization format on a GPU, against the reference with the same dequantized values."""

from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
import torch

from engine.backends.cuda.device import CudaDevice, CudaOptions
from engine.backends.reference import ReferenceDevice
from quant.tensor import PlainTensor, QTensor
from tests.engine.backends.cuda.two_devices import CLOSE, TwoDevices, check_close, gpu, load_checkpoint
from tests.engine.checkpoints.quantized_folders import KINDS, quantized_folder
from tests.engine.models import tiny_llama
from tests.gpu.random_checkpoint import RandomCheckpoint
from tests.kernels.shapes import TINY_EXPERTS
from tests.support import random_gguf

ONE_LAYER = random_gguf.Shape(1, 256, 4, 2, 64, 256, 272)
TWO_LAYERS = replace(ONE_LAYER, layers=2)
ERROR = 0.02  # of logits, relative to their norm
MATRICES = 9  # matrices of the model: seven of its layer, the embedding, and the head
GGUF_TYPES = [" ".join(random_gguf.TYPES[start:][:MATRICES]) for start in range(0, len(random_gguf.TYPES), MATRICES)]


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_folder_is_close_to_the_reference(tmp_path: Path, kind: str, device: torch.device) -> None:
    both = TwoDevices.of(quantized_folder(tmp_path, kind, layers=1).path, gpu(device))
    check_close(*both.prefill_and_decode())


@pytest.mark.parametrize("kinds", [*GGUF_TYPES, "Q4_K"])
def test_gguf_types_are_close_to_the_reference(tmp_path: Path, kinds: str, device: torch.device) -> None:
    random_gguf.write(path := tmp_path / "random.gguf", kinds, ONE_LAYER)
    check_close(*TwoDevices.of(path, gpu(device)).prefill_and_decode())


@pytest.mark.parametrize("kinds", [*GGUF_TYPES, "Q4_K"])
def test_step_of_one_token_is_close_to_the_reference(tmp_path: Path, kinds: str, device: torch.device) -> None:
    """Norms and gates are parts of products if their weights are quantized."""
    random_gguf.write(path := tmp_path / "random.gguf", kinds, TWO_LAYERS)
    both = TwoDevices.of(path, gpu(device))
    check_close(*both.step((both.cached(4, 1, 7), 1)))


class ShuffledCheckpoint(RandomCheckpoint):
    """A random checkpoint with the rows of each matrix in another order, so that experts differ.

    The norm before the experts makes their outputs as large as the residual stream.
    """

    def _make(self, name: str, shape: tuple[int, ...], device: torch.device) -> QTensor:
        made = super()._make(name, shape, device)
        if isinstance(made, PlainTensor):
            return replace(made, values=20 * made.values) if name.endswith("ffn_norm") else made
        return made.rows(torch.randperm(shape[0], generator=torch.Generator().manual_seed(crc32(name.encode()))))


@pytest.mark.share(1)
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4", "int4 g32 zeros"])
def test_quantized_experts_are_close_to_the_reference(kind: str, device: torch.device) -> None:
    checkpoint = ShuffledCheckpoint(TINY_EXPERTS, kind, torch.device("cpu"))
    devices = CudaDevice(gpu(device), CudaOptions()), ReferenceDevice(keep_dequantized=True, threads=1)
    both = TwoDevices(*(load_checkpoint(checkpoint, it) for it in devices))
    # one token, whose experts need no sorting, and several requests
    for cuda, reference in (both.step((both.cached(4, 1, 7), 1)), both.prefill_and_decode()):
        check_close(cuda, reference)
        assert (cuda - reference).norm() <= ERROR * reference.norm()


@pytest.mark.parametrize(("kv_type", "close"), [(torch.float16, CLOSE), (torch.uint8, 0.02)])
def test_kv_cache_types_are_close_to_the_reference(
    tmp_path: Path, kv_type: torch.dtype, close: float, device: torch.device
) -> None:
    both = TwoDevices.of(tiny_llama.make(tmp_path, layers=1).path, gpu(device), CudaOptions(kv_type))
    check_close(*both.prefill_and_decode(), close)
