"""Recorded programs for tests: a whole model from a file, or a few operations over given rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine import models
from engine.backends.cpu.buffers import Activation
from engine.backends.cpu.code_cache import load_code
from engine.backends.cpu.device import CpuDevice, CpuStep
from engine.backends.cpu.instructions import Limits
from engine.backends.cpu.operations import CpuOperations, LogitRows, block_shape
from engine.backends.cpu.program import Program
from engine.batch import Batch, build_batch, placeholder_batch
from engine.checkpoints.weights import Weights
from engine.config import BLOCK_SIZE, EngineConfig, GroupConfig
from engine.cpu_threads import ThreadPool
from engine.kv.blocks import NULL_BLOCK
from engine.kv.cache import KVCache, KVGroup, LayerBlock
from engine.loading import open_checkpoint
from engine.mixer_config import StateConfig
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from quant.cpu.activations import Form
from quant.cpu.arena import Arena
from quant.cpu.linear import CpuBackend
from quant.cpu.tiers import choose
from quant.linear import QLinear
from quant.tensor import PlainTensor, QTensor
from tests.quant.cpu.poisoning import poison as poison_regions
from tests.support.held_request import HeldRequest
from tests.support.kv_groups import kv_group

# Regions that a step reads without having written them. All others may be overwritten before a step.
INPUTS = {
    "weight", "addresses", "order", "constant", "header", "token ids", "positions", "slots", "output rows", "tiles",
    "block tables", "query starts", "KV cache",
}  # fmt: skip


def load_step(
    path: Path,
    code_cache: Path,
    config: EngineConfig,
    *,
    activation_bits: int = 14,
    kv_type: torch.dtype = torch.float16,
    pool: ThreadPool | None = None,
) -> CpuStep:
    """Load a model on the CPU device."""
    with open_checkpoint(path) as checkpoint:
        model = models.read_config(checkpoint.metadata)
        device = CpuDevice(config.threads, activation_bits, choose("auto"), code_cache, kv_type, pool=pool)
        step = device.load(model, Weights(checkpoint.path, models.stored_weights(checkpoint)), config).compute
    assert isinstance(step, CpuStep)
    return step


def spoil(pool: Tensor) -> None:
    """Fill a KV pool with NaN: its elements if they are float16, or its scales if the elements are int8."""
    pool.view(torch.uint8).fill_(0xFF)


def poison(step: CpuStep) -> None:
    """Fill every buffer that the next step must write before reading with NaN."""
    poison_regions(step.arena, *{region.name for region, _ in step.arena._regions} - INPUTS)


def compute(step: CpuStep, batch: Batch, threads: int | None = None) -> Tensor:
    """Return the logits of a batch, computed from buffers full of NaN. Checks all guards afterwards."""
    poison(step)
    step.fill(batch)
    step.workers.run(len(batch.token_ids), threads)
    step.arena.check_guards()
    return step.logits(len(batch.logit_rows)).values.clone()


# -- requests without a scheduler


def sequence(number: int, ids: Sequence[int], *blocks: Sequence[int]) -> HeldRequest:
    """Return a request that holds the given blocks of each KV group."""
    return HeldRequest(number, tuple(ids), SamplingParams(), block_tables=tuple(map(list, blocks)))


def advance(
    parts: Sequence[tuple[HeldRequest, int]],
    *,
    vocab_size: int,
    num_blocks: int,
    groups: Sequence[GroupConfig] = (GroupConfig(),),
) -> Batch:
    """Return the batch of the requests' next tokens, with a logit row for each token. Advances `num_computed`."""
    scheduled = tuple(it.part(it.num_computed, count) for it, count in parts)
    batch = build_batch(StepPlan(scheduled), vocab_size=vocab_size, num_blocks=num_blocks, groups=groups)
    for it, count in parts:
        it.num_computed += count
    return replace(batch, logit_rows=range(len(batch.token_ids)))


def compute_in_steps(
    step: CpuStep,
    request: HeldRequest,
    counts: Sequence[int],
    *,
    vocab_size: int,
    num_blocks: int,
    groups: Sequence[GroupConfig],
) -> Tensor:
    """Return the logits of a request's next tokens, computed in steps of `counts` tokens."""
    return torch.cat(
        [
            compute(step, advance([(request, count)], vocab_size=vocab_size, num_blocks=num_blocks, groups=groups))
            for count in counts
        ]
    )


# -- steps of a few operations


Forward = Callable[[CpuOperations, Batch, KVCache], Activation | LogitRows]


@dataclass(frozen=True)
class Recorded:
    """A step of a few operations. A token's id is the row that the first operation reads."""

    step: CpuStep
    kv: KVCache

    def elements(self, layer: int, block: int) -> tuple[Tensor, Tensor]:
        """Return the stored k and v of a block, [kv_heads, 16, head_dim], without scales."""
        kv = self.kv.layer(layer)
        k, v = kv.pool[block, :, : 2 * BLOCK_SIZE * kv.head_dim].float().chunk(2, dim=1)
        return k.reshape(kv.kv_heads, -1, BLOCK_SIZE).mT, v.reshape(kv.kv_heads, BLOCK_SIZE, -1)

    def scales(self, layer: int, block: int) -> tuple[Tensor, Tensor]:
        """Return the scales of k and v, [kv_heads, 16, 1]; 1 if there are none."""
        kv = self.kv.layer(layer)
        if kv.pool.dtype is torch.float16:
            return torch.ones(kv.kv_heads, BLOCK_SIZE, 1), torch.ones(kv.kv_heads, BLOCK_SIZE, 1)
        scales = kv.pool[block, :, 2 * BLOCK_SIZE * kv.head_dim :].contiguous().view(torch.float32)
        return scales[:, :BLOCK_SIZE, None], scales[:, BLOCK_SIZE:, None]

    def pool(self, layer: int, block: int) -> tuple[Tensor, Tensor]:
        """Return the k and v of a block, [kv_heads, 16, head_dim]."""
        (k, v), (k_scale, v_scale) = self.elements(layer, block), self.scales(layer, block)
        return k * k_scale, v * v_scale


def cpu_group(group: KVGroup, kv_type: torch.dtype = torch.float16) -> KVGroup:
    """Return the group with the layout of the CPU device."""
    if isinstance(group.cache, StateConfig):
        return group
    shape = block_shape(kv_type, group.cache.kv_heads, group.cache.head_dim)
    return replace(group, layer_block=LayerBlock(shape, kv_type))


def record(
    code_cache: Path,
    forward: Forward,
    *,
    groups: Sequence[KVGroup] = (kv_group((0,), 1, 32),),
    form: Form = Form.BITS_14,
    tokens: int = 40,
    context: int = 320,
    threads: int = 2,
    num_blocks: int = 64,
    kv_type: torch.dtype = torch.float16,
) -> Recorded:
    """Record a step of some operations. The last one returns the logit rows. All blocks of the KV pool are NaN."""
    enter, arena = load_code(code_cache, choose("auto"), ()), Arena()
    limits = Limits(
        tokens=tokens,
        outputs=tokens,
        requests=4,
        context=context,
        num_blocks=(num_blocks,) * len(groups),
        threads=threads,
    )
    program = Program(arena, limits)
    operations = CpuOperations(CpuBackend(arena, form), program)
    kv = KVCache([cpu_group(group, kv_type) for group in groups], limits.num_blocks)
    for group, pool in zip(groups, kv.pools, strict=True):
        spoil(pool)
        if isinstance(group.cache, StateConfig):
            pool[NULL_BLOCK] = 0  # the state before the first token
    last = forward(operations, placeholder_batch(), kv)
    if not isinstance(last, LogitRows):
        last = operations.logits(last, unit(operations, last.width))
    return Recorded(CpuStep(enter, program, kv, last), kv)


def plain(values: Tensor) -> QTensor:
    """Return a float32 matrix as a weight."""
    return PlainTensor(tuple(values.shape), "F32", values)


def layer(operations: CpuOperations, *segments: QTensor) -> QLinear:
    return operations.weights.linear(segments)


def unit(operations: CpuOperations, width: int) -> QLinear:
    """Return an identity layer. Its product may change the sign of a zero, but no other bit."""
    return layer(operations, PlainTensor((width, width), "F16", torch.eye(width, dtype=torch.float16)))
