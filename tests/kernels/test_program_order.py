"""The results of kernels do not depend on the order in which their programs run. A race shows as different bits."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.device import CudaDevice, CudaOptions
from engine.backends.cuda.gpu import Gpu
from engine.kernels.chunk_passes import BLOCK
from engine.kernels.sampling import sample
from engine.kernels.sampling_rows import SampleTarget, build_rows
from engine.kernels.step_logits import StepLogits
from engine.request import Request
from engine.sampling.masks import NO_MASKS
from engine.sampling_params import SamplingParams
from quant.cuda.backend import CudaBackend
from quant.cuda.linear import CudaLinear
from quant.cuda.loading import to_device
from quant.cuda.matrix import PackedMatrix
from quant.kernels.tiles import TOKENS, ProductShape, ProductTile
from quant.kernels.token_tiles import token_tiles
from tests.engine.backends.cuda.two_devices import INTERPRETED, load, tokens
from tests.kernels.weights import weight
from tests.quant.cpu.random_weights import random_weight
from tests.support import random_gguf
from tests.support.held_request import HeldRequest
from tests.support.triton_interpreter import programs_in_order

Order = Callable[[int], Sequence[int]]
BLOCKS, CACHED = (3, 8, 2), 34
ONE_LAYER = random_gguf.Shape(1, 256, 4, 2, 64, 256, 272)

# a test that runs on a card cannot choose the order of programs
pytestmark = pytest.mark.usefixtures("device")


@triton.jit
def _chain_kernel(out: tl.tensor) -> None:
    """A kernel with a race: each program reads what the one before it writes."""
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(out + program + 1, tl.load(out + program) + 1)


@triton.jit
def _shared_slot_kernel(x: tl.tensor, out: tl.tensor) -> None:
    """A kernel with a race: all programs add to one number, in floats that are rounded."""
    tl.store(out, tl.load(out) + tl.load(x + tl.program_id(0)))


def chain() -> Tensor:
    out = torch.zeros(13)
    _chain_kernel[3, 4](out)
    return out


def shared_slot() -> Tensor:
    out = torch.zeros(1)
    _shared_slot_kernel[40,](torch.logspace(-9, 9, 40), out)
    return out


def orders(seed: int) -> list[Order]:
    """Return the reverse order and a random one."""

    def shuffled(count: int) -> list[int]:
        return random.Random(f"{seed} {count}").sample(range(count), count)

    return [lambda count: range(count)[::-1], shuffled]


def depends_on_order(run: Callable[[], Tensor], orders: Sequence[Order]) -> bool:
    """Whether the bits of a result differ between the usual order and the given ones."""
    expected = run()
    for order in orders:
        with programs_in_order(order):
            found = run()
        if not torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)):
            return True
    return False


@pytest.mark.parametrize("racy", [chain, shared_slot])
def test_racy_kernels_are_found(racy: Callable[[], Tensor], seed: int) -> None:
    assert depends_on_order(racy, orders(seed))


def test_every_program_runs_once_in_any_order(seed: int) -> None:
    ran: list[int] = []

    def noted(count: int) -> Sequence[int]:
        ran.append(count)
        return orders(seed)[1](count)

    with programs_in_order(noted):
        chain()
    assert ran == [12]
    assert sorted(orders(seed)[1](12)) == list(range(12))


@pytest.mark.share(1)
@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_of_a_model(deterministic: bool, tmp_path: Path, seed: int) -> None:
    """Embedding, norms, products, rope, storage of keys and values, attention with several parts, and gates.

    A step takes seconds in the interpreter, so a run takes one of the orders.
    """
    random_gguf.write(path := tmp_path / "random.gguf", "Q4_K", ONE_LAYER)
    options = CudaOptions(deterministic=deterministic)

    def run() -> Tensor:
        loaded = load(path, CudaDevice(Gpu(INTERPRETED), options))
        request = HeldRequest(
            1, tuple(tokens(CACHED + 1, loaded.vocab_size)), SamplingParams(), block_tables=(list(BLOCKS),)
        )
        found = []
        for count in (20, CACHED - 20, 1):
            found.append(loaded.step((request, count)))
            request.num_computed += count
        (pool,) = loaded.model.kv.pools
        return torch.cat([*(it.flatten() for it in found), pool[list(BLOCKS)].flatten().float()])

    assert not depends_on_order(run, orders(seed)[seed % 2 :][:1])


@pytest.mark.share(2)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("count", "rows", "limit"), [(1, 16, 1), (16, 16, 16), (20, 64, 16)])
def test_products_that_several_programs_share(count: int, rows: int, limit: int, splits: int, seed: int) -> None:
    matrix = to_device(weight("Q4_K", 64, 2048, torch.device("cpu")), torch.device("cpu"))
    assert isinstance(matrix, PackedMatrix)
    tile = ProductTile(rows=rows, warps=2, tokens=limit, splits=splits)
    shapes = [ProductShape(matrix.form.kind, 64, 2048, it, matrix.form.few_tokens) for it in TOKENS]
    layer = CudaLinear([matrix], INTERPRETED, deterministic=False, measured=dict.fromkeys(shapes, tile))
    x = torch.randn(count, 2048).bfloat16()
    added = torch.randn(count, 64)
    assert not depends_on_order(lambda: layer.multiply(x, add_to=added.clone()), orders(seed))


@pytest.mark.parametrize("kind", ["Q4_K", "BF16"])
@pytest.mark.parametrize("slots", [1, 16])
def test_products_of_experts(slots: int, kind: str, seed: int) -> None:
    layers = [[random_weight(kind, 24, 256, np.random.default_rng(seed + number))] for number in range(3)]
    stack = CudaBackend(torch.device("cpu"), INTERPRETED, deterministic=False).stack(layers, 3)
    tiles = token_tiles(torch.tensor([[0], [2], [0], [1]], dtype=torch.int32), 3, slots)
    x = torch.randn(4, 256)
    assert not depends_on_order(lambda: stack.multiply(x, tiles), orders(seed))


def test_grouping_of_tokens_by_expert(seed: int) -> None:
    ids = torch.randint(0, 5, (40, 1), dtype=torch.int32)
    used = 16 * sum(-(-count // 16) for count in ids.flatten().bincount().tolist())

    def grouped() -> Tensor:
        tiles = token_tiles(ids, 5, 16)
        assert tiles.slots is not None
        return torch.cat([tiles.experts, tiles.slots[:used]])

    assert not depends_on_order(grouped, orders(seed))


def test_sampling(seed: int) -> None:
    vocabulary = 2 * BLOCK + 500
    logits = torch.randn(4, vocabulary)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1, top_k=20, top_p=0.9, seed=1),
        SamplingParams(temperature=1, presence_penalty=1.0, logprobs=2, seed=2),
        SamplingParams(temperature=1, min_p=0.01, seed=3),
    ]
    targets = [SampleTarget(row, Request(row, (1,), it), 0) for row, it in enumerate(params)]
    rows = build_rows(targets, vocabulary, NO_MASKS)

    def sampled() -> Tensor:
        found = sample(StepLogits.of(logits.clone()), rows.to(logits.device)).columns
        return torch.cat([found.token_ids, found.token_logprobs[2:3].view(torch.int32), found.top_ids[2]])

    assert not depends_on_order(sampled, orders(seed))
