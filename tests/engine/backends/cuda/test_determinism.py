"""With --deterministic, a token's logits have the same bits alone, in a batch, and with any chunking of its prompt."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.backends.cuda.device import CudaDevice, CudaOptions
from engine.sampling_params import SamplingParams
from tests.engine.backends.cuda.two_devices import Loaded, gpu, load, tokens
from tests.engine.models.expert_families import EXPERT_FAMILIES
from tests.engine.models.family_checkpoints import random_model
from tests.engine.models.tiny_llama import MIXES, make
from tests.support.held_request import HeldRequest

QWEN2 = EXPERT_FAMILIES["qwen2 moe"]
ONE_LAYER = replace(QWEN2, options={**QWEN2.options, "num_hidden_layers": 1})


def request(ids: list[int], *blocks: int) -> HeldRequest:
    return HeldRequest(1, tuple(ids), SamplingParams(), block_tables=(list(blocks),))


def advance(loaded: Loaded, *parts: tuple[HeldRequest, int]) -> torch.Tensor:
    logits = loaded.step(*parts)
    for it, count in parts:
        it.num_computed += count
    return logits


def quantized(folder: Path) -> Path:
    return make(folder, types=MIXES["Q4_0"], layers=1).path


def experts(folder: Path) -> Path:
    random_model(ONE_LAYER, seed=3).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("make_model", [quantized, experts])
def test_bits_are_equal_alone_batched_and_chunked(
    make_model: Callable[[Path], Path], tmp_path: Path, device: torch.device
) -> None:
    path = make_model(tmp_path)
    loaded = load(path, CudaDevice(gpu(device), CudaOptions(deterministic=True)))
    ids = tokens(9, loaded.vocab_size)
    alone, together, cut = (request(ids, *blocks) for blocks in ((1, 2), (3, 4), (5, 6)))
    others = [request(tokens(length, loaded.vocab_size), block) for length, block in ((2, 7), (1, 8))]
    wanted = advance(loaded, (alone, 9))[0]
    assert torch.equal(advance(loaded, (others[0], 2), (together, 9), (others[1], 1))[1], wanted)
    advance(loaded, (cut, 5))
    assert torch.equal(advance(loaded, (cut, 4))[0], wanted)
    for it in (alone, together, cut, *others):
        it.output_ids.append(5)
    wanted = advance(loaded, (alone, 1))[0]
    batch = advance(loaded, (others[0], 1), (together, 1), (others[1], 1))
    assert torch.equal(batch[1], wanted)
