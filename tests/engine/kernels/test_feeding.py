"""Sampled tokens, fed on the device."""

import torch

from engine.kernels.feeding import feed
from engine.kernels.sampling_rows import NOT_A_NUMBER


def test_tokens_go_where_they_belong(device: torch.device) -> None:
    sampled = torch.randint(1, 1 << 40, (200,))
    sampled[7] = NOT_A_NUMBER
    rows, places = torch.randint(0, 200, (300,), dtype=torch.int32), torch.randperm(500, dtype=torch.int32)[:300]
    rows[0] = 7
    places[250:] = -1  # padding
    token_ids = torch.full((500,), 5)
    expected = token_ids.clone()
    expected[places[:250].long()] = sampled[rows[:250].long()].clamp(min=0)
    on_device = token_ids.to(device, copy=True)
    feed(sampled.to(device), rows.to(device), places.to(device), on_device)
    assert torch.equal(on_device.cpu(), expected)
