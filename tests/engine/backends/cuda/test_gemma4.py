"""Gemma 4 on a GPU, in which the last layers compute only the tokens whose logits are needed."""

from pathlib import Path

import torch

from engine.backends.cuda.device import CudaOptions
from tests.engine.backends.cuda.two_devices import TwoDevices, gpu, tokens
from tests.engine.models.family_checkpoints import make


def test_prompt_in_parts_has_the_bits_of_a_whole_one(tmp_path: Path, device: torch.device) -> None:
    """The first part needs no logits, so that the last layers compute nothing."""
    path = make(tmp_path, "gemma4 embeddings per layer", "folder").path
    both = TwoDevices.of(path, gpu(device), CudaOptions(deterministic=True))
    ids = tokens(9, both.cuda.vocab_size)
    whole, parts, other = both.request(ids, 1), both.request(ids, 2), both.request(tokens(2, both.cuda.vocab_size), 3)
    wanted = both.cuda.step((other, 2), (whole, 9))[1]
    assert len(both.cuda.step((parts, 5))) == 0
    parts.num_computed = 5
    assert torch.equal(both.cuda.step((parts, 4))[0], wanted)
