"""Measure copies of blocks between GPU and host pools, relative to copies of pinned memory."""

from collections.abc import Iterator

import torch

from engine.backends.cuda.blocks import GpuBlocks
from engine.backends.cuda.gpu import Gpu
from engine.kv.transfers import MoveBlock
from tests.gpu.figures import Figure, fraction
from tests.gpu.machine import Machine
from tests.kernels.shapes import LLAMA_8B, TINY, mixer_of
from tests.support.kv_groups import kv_group


def figures(machine: Machine) -> Iterator[Figure]:
    """Measure a request of several thousand tokens, whose blocks are adjacent or scattered."""
    model, blocks = (TINY, 4) if machine.dry else (LLAMA_8B, 256)
    mixer = mixer_of(model)
    group = kv_group(tuple(range(len(model.layers))), mixer.kv_heads, mixer.head_dim, torch.bfloat16)
    gpu = Gpu(machine.card)
    pools = [2 * blocks + 1]
    kv = GpuBlocks(gpu, [group], pools, pools)
    nbytes = blocks * kv.block_bytes[0]
    orders = {"in a row": list(range(1, blocks + 1)), "anywhere": (1 + torch.randperm(blocks)).tolist()}
    for order, targets in orders.items():
        for to_host, title, peak in ((True, "out", machine.peaks.to_host), (False, "in", machine.peaks.to_device)):
            moves = [MoveBlock(0, source, target, to_host) for source, target in enumerate(targets, 1)]
            rate = nbytes / machine.seconds_on_host(lambda moves=moves: kv.move(moves))  # type: ignore[misc]
            yield Figure(f"swap {title}, blocks {order}", rate / 1e9, "GB/s", fraction(rate, peak), "pinned copy", 0.8)
