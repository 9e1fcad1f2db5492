"""Grouping of tokens by expert: every slot is in one tile of its expert."""

import pytest
import torch

from quant.kernels import token_tiles as module
from quant.kernels.token_tiles import NO_EXPERT, most_tiles, token_tiles

pytestmark = pytest.mark.usefixtures("fenced_memory")


def random_ids(tokens: int, active: int, experts: int) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(active).indices.sort().values.int()


@pytest.mark.parametrize(
    ("tokens", "active", "experts", "size"), [(1, 3, 8, 16), (40, 2, 5, 16), (7, 1, 1, 32), (6, 6, 15, 16)]
)
def test_every_slot_is_in_one_tile_of_its_expert(
    tokens: int, active: int, experts: int, size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(module, "LEAST_BINS", 2)
    ids = random_ids(tokens, active, experts)
    tiles = token_tiles(ids.to(device), experts, size)
    assert tiles.slots is not None
    assert (tiles.count, tiles.active, tiles.number) == (ids.numel(), active, most_tiles(ids.numel(), experts, size))
    slots = tiles.slots.cpu().view(-1, size)
    used = int((tiles.experts != NO_EXPERT).sum())
    assert tiles.experts[:used].cpu().diff().ge(0).all()
    assert (tiles.experts[used:] == NO_EXPERT).all()
    found = slots[:used]
    kept = found < ids.numel()
    assert sorted(found[kept].tolist()) == list(range(ids.numel()))
    assert torch.equal(ids.flatten()[found[kept].long()], tiles.experts[:used].cpu().repeat_interleave(kept.sum(1)))
    assert (found[~kept] == ids.numel()).all()
    assert used == sum(-(-count // size) for count in ids.flatten().bincount().tolist())


def test_tiles_of_one_slot_need_no_sorting(device: torch.device) -> None:
    ids = random_ids(2, 3, 8).to(device)
    tiles = token_tiles(ids, 8, 1)
    assert tiles.slots is None
    assert torch.equal(tiles.experts, ids.flatten())


def test_most_tiles_are_needed_if_experts_have_partial_tiles() -> None:
    assert most_tiles(8, 128, 16) == 8
    assert most_tiles(17 + 1 + 1, 3, 16) == 4
    assert most_tiles(4096 * 8, 128, 128) == 256 + 127
