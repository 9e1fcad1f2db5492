"""The kernel that copies sampled tokens into the next step's token ids on the device."""

import torch

from engine.kernels.pending_tokens import fill_pending_tokens
from engine.kernels.sampling_rows import NOT_A_NUMBER


def test_sampled_tokens_are_written_to_their_indices(device: torch.device) -> None:
    sampled = torch.randint(1, 1 << 40, (200,))
    sampled[7] = NOT_A_NUMBER
    rows, indices = torch.randint(0, 200, (300,), dtype=torch.int32), torch.randperm(500, dtype=torch.int32)[:300]
    rows[0] = 7
    indices[250:] = -1  # padding
    token_ids = torch.full((500,), 5)
    expected = token_ids.clone()
    expected[indices[:250].long()] = sampled[rows[:250].long()].clamp(min=0)
    on_device = token_ids.to(device, copy=True)
    fill_pending_tokens(sampled.to(device), rows.to(device), indices.to(device), on_device)
    assert torch.equal(on_device.cpu(), expected)
