"""Rotary embedding, the KV store, and attention in a step, against the reference implementations."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.buffers import Activation
from engine.backends.cpu.operations import CpuOperations
from engine.batch import Batch
from engine.config import BLOCK_SIZE
from engine.kernels import reference
from engine.kv.cache import KVCache
from engine.model_config import HeadNorm, NormKind
from tests.engine.backends.cpu.attention_case import (
    BLOCKS,
    CONTEXT,
    LAYER,
    SEED,
    Case,
    Shape,
    check_all_chunkings,
    random_chunks,
    random_rows,
    scattered_requests,
)
from tests.engine.backends.cpu.recorded import layer, plain, record, sequence
from tests.support.held_request import HeldRequest
from tests.support.kv_groups import kv_group

pytestmark = pytest.mark.usefixtures("plain_layouts")

GROUPS = [*((torch.float16, group) for group in range(1, 10)), *((torch.int8, group) for group in (1, 2, 3, 4, 9))]


@pytest.mark.share(1, "kv_type", "group")
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize(("kv_type", "group"), GROUPS)
def test_attention_equals_the_reference_for_all_chunkings(
    cpu_kernels: Path, head_dim: int, kv_type: torch.dtype, group: int
) -> None:
    check_all_chunkings(Shape(1 + group % 2, group, head_dim, group % 3 > 0), cpu_kernels, kv_type)


WIDTHS = [Shape(2, 1, 80, False, 20), Shape(2, 3, 192), Shape(1, 4, 256, False), Shape(2, 1, 48)]


@pytest.mark.share(1, "shape")
@pytest.mark.parametrize("shape", WIDTHS, ids=str)
@pytest.mark.parametrize("kv_type", [torch.float16, torch.int8])
def test_attention_supports_other_head_widths(cpu_kernels: Path, shape: Shape, kv_type: torch.dtype) -> None:
    check_all_chunkings(shape, cpu_kernels, kv_type)


@pytest.mark.share(5)
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 16, 33, 128, 129, 200, 299, 300, 5000])
def test_window_excludes_earlier_positions(cpu_kernels: Path, window: int) -> None:
    """Blocks before the window are released and become NaN."""
    kv_type, group = ((torch.float16, 1), (torch.float16, 8), (torch.int8, 3))[window % 3]
    check_all_chunkings(Shape(2, group, 32, window=window), cpu_kernels, kv_type)


@pytest.mark.share(2)
@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize(("kv_type", "group"), [(torch.float16, 8), (torch.int8, 3)])
def test_soft_cap_is_applied_to_scores(cpu_kernels: Path, kv_type: torch.dtype, group: int, softcap: float) -> None:
    check_all_chunkings(Shape(1, group, 64, softcap=softcap, window=90), cpu_kernels, kv_type)


ROTARY_DIMS = [(32, 2), (32, 30), (64, 32), (80, 20), (80, 32), (80, 80), (96, 96), (64, 0), (48, 34)]
STORED = 51  # tokens, stored in three steps


def stored_kv(case: Case, request: HeldRequest) -> tuple[Tensor, Tensor]:
    """Return the keys and values, [STORED, kv_heads, head_dim], in a request's blocks. Checks that nothing else was
    written.
    """
    it = case.it
    case.run(iter([[(request, 37)], [(request, 1)], [(request, 13)]]))
    written = -(-STORED // BLOCK_SIZE)
    blocks, last = request.block_table[:written], request.block_table[written - 1]
    memory = it.kv.pools[0].view(torch.uint8)
    assert (memory[[block for block in range(BLOCKS) if block not in blocks]] == 0xFF).all()
    assert (memory[:, 1 - LAYER] == 0xFF).all()
    for part, poisoned in zip(it.elements(LAYER, last), it.elements(LAYER, 0), strict=True):
        rest = slice(STORED % BLOCK_SIZE, None)
        torch.testing.assert_close(part[:, rest], poisoned[:, rest], rtol=0, atol=0, equal_nan=True)
    pools = [it.pool(LAYER, block) for block in blocks]
    k, v = (torch.cat([pool[n] for pool in pools], dim=1).transpose(0, 1) for n in (0, 1))
    assert k[STORED:].isnan().all()
    assert v[STORED:].isnan().all()
    return k[:STORED], v[:STORED]


def expected_kv(shape: Shape, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values that should be stored, [STORED, kv_heads, head_dim]."""
    (_, _, v), norms = shape.split(rows[:STORED]), shape.norms
    return shape.rotated(rows[:STORED])[1], reference.normalize(v, norms.v) if norms and norms.v else v


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_keys_are_rotated_and_written_to_their_slots(cpu_kernels: Path, head_dim: int, interleaved: bool) -> None:
    shape = Shape(3, 2, head_dim, interleaved)
    rows = random_rows(shape)
    request, _ = scattered_requests(random.Random(SEED))
    k, v = stored_kv(Case.recorded(shape, rows, cpu_kernels), request)
    rotated, values = expected_kv(shape, rows)
    assert torch.equal(v, values.half().float())
    torch.testing.assert_close(k, rotated, rtol=2**-11, atol=1e-6)  # half of the last bit of float16


SPREAD = [Shape(2, 3, 96, False, 32, HeadNorm.EACH, span=96), Shape(1, 2, 512, False, 128, HeadNorm.EACH, span=512)]


@pytest.mark.parametrize("shape", SPREAD, ids=str)
def test_rotated_pairs_can_be_spread_and_values_normalized(cpu_kernels: Path, shape: Shape) -> None:
    shape = replace(shape, value_norm=True)
    rows = random_rows(shape)
    request, _ = scattered_requests(random.Random(SEED))
    k, v = stored_kv(Case.recorded(shape, rows, cpu_kernels), request)
    rotated, values = expected_kv(shape, rows)
    torch.testing.assert_close(v, values, rtol=2**-10, atol=1e-6)
    torch.testing.assert_close(k, rotated, rtol=2**-10, atol=1e-5)
    check_all_chunkings(shape, cpu_kernels, error=1e-4)


def test_rows_of_queries_attend_to_keys_that_another_layer_has_stored(cpu_kernels: Path) -> None:
    shape = Shape(2, 2, 64, False, head_norm=HeadNorm.EACH, window=50)
    rows, others = random_rows(shape), random_rows(shape, seed=3)
    queries, size = others[:, : shape.heads * shape.head_dim], shape.heads * shape.head_dim
    attention = shape.attention
    shared = replace(attention, shared=True)

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        stored = ops.embed(batch, layer(ops, plain(rows)))
        ops.rope_and_store(stored, batch, kv.layer(LAYER), attention)
        q = ops.rope_and_store(ops.embed(batch, layer(ops, plain(queries))), batch, kv.layer(LAYER), shared)
        return ops.attend(q, batch, kv.layer(LAYER), shared)

    groups = [kv_group((0, 1), shape.kv_heads, shape.head_dim)]
    recorded = record(cpu_kernels, forward, groups=groups, num_blocks=BLOCKS)
    both = torch.cat([queries, rows[:, size:]], dim=1)
    got, want = (
        it.run(random_chunks(scattered_requests(random.Random(SEED)), random.Random(SEED)))
        for it in (Case(shape, rows, recorded), Case.recorded(shape, both, cpu_kernels))
    )
    assert got.keys() == want.keys()
    assert all(torch.equal(got[token], want[token]) for token in want)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [..., head_dim] to codes and one scale per head, as the kernel does."""
    top = x.abs().amax(-1, keepdim=True)
    return (x * torch.where(top > 1e-30, torch.tensor(127.0) / top, 0)).round(), top * (1 / 127)


NORMED_SHAPES = [
    *(
        Shape(2, 2, head_dim, interleaved, rotary_dim)
        for interleaved in (True, False)
        for head_dim, rotary_dim in ROTARY_DIMS
    ),
    *(Shape(3, 2, head_dim, False, head_norm=norm) for norm in HeadNorm for head_dim in (32, 64, 256)),
    *(Shape(3, 2, 64, head_norm=norm, norm_kind=NormKind.LAYER) for norm in HeadNorm),
    Shape(2, 1, 128, head_norm=HeadNorm.ALL, rotary_dim=0),
    Shape(1, 1, 64, head_norm=HeadNorm.ALL, rotary_dim=6),
    Shape(1, 4, 96, head_norm=HeadNorm.EACH, rotary_dim=48),
]


@pytest.mark.parametrize("shape", NORMED_SHAPES, ids=str)
def test_heads_are_normalized_and_partially_rotated(cpu_kernels: Path, shape: Shape) -> None:
    rows = random_rows(shape)
    case, (request, _) = Case.recorded(shape, rows, cpu_kernels), scattered_requests(random.Random(SEED))
    k, v = stored_kv(case, request)
    rotated, values = expected_kv(shape, rows)
    assert torch.equal(v, values.half().float())
    torch.testing.assert_close(k, rotated, rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("shape", [NORMED_SHAPES[1], *NORMED_SHAPES[-9::2]], ids=str)
def test_queries_are_normalized_and_rotated_like_keys(cpu_kernels: Path, shape: Shape) -> None:
    check_all_chunkings(shape, cpu_kernels, error=3e-5)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1, 1e6])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_int8_cache_has_a_scale_per_token_and_head(cpu_kernels: Path, head_dim: int, size: float) -> None:
    """Values must be equal bit for bit. A rotated key that is close to a half step may round either way."""
    shape = Shape(3, 2, head_dim)
    rows = random_rows(shape) * size * torch.rand(2 * CONTEXT, 1, generator=torch.Generator().manual_seed(SEED))
    rows[5] = 0
    request, _ = scattered_requests(random.Random(SEED))
    k, v = stored_kv(Case.recorded(shape, rows, cpu_kernels, torch.int8), request)
    rotated, values = expected_kv(shape, rows)
    codes, scales = quantize_int8(values)
    assert codes[6:].abs().amax(-1).eq(127).all()
    assert torch.equal(v, codes * scales)
    assert ((k - rotated).abs() <= 0.501 * quantize_int8(rotated)[1]).all()


@pytest.mark.parametrize("size", [0, 1e-38])
def test_values_too_small_for_a_scale_become_zero(cpu_kernels: Path, size: float) -> None:
    shape = Shape(1, 2, 32)
    request, _ = scattered_requests(random.Random(SEED))
    k, v = stored_kv(Case.recorded(shape, random_rows(shape) * size, cpu_kernels, torch.int8), request)
    assert not k.any()
    assert not v.any()


@pytest.mark.parametrize("poisoned", [torch.nan, torch.inf])
def test_nan_stays_nan_in_an_int8_cache(cpu_kernels: Path, poisoned: float) -> None:
    """Tokens that attend to the NaN value are NaN, and earlier tokens are finite."""
    shape = Shape(1, 2, 32)
    rows = random_rows(shape)
    rows[6, -3] = poisoned
    case = Case.recorded(shape, rows, cpu_kernels, torch.int8)
    out = case.run(iter([[(sequence(1, range(20), [5, 9]), 9)]]))
    assert [token for token, row in out.items() if row.isnan().all()] == [6, 7, 8]
    assert all(out[token].isfinite().all() for token in range(6))


@pytest.mark.parametrize("kv_type", [torch.float16, torch.int8])
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e3])
def test_attention_is_accurate_for_scores_of_any_size(cpu_kernels: Path, size: float, kv_type: torch.dtype) -> None:
    """The scores range from nearly equal ones to a single dominant one. Results neither overflow nor lose precision."""
    shape = Shape(2, 3, 64)
    rows = random_rows(shape)
    rows[:, : shape.heads * 64] *= size
    case = Case.recorded(shape, rows, cpu_kernels, kv_type)
    requests = scattered_requests(random.Random(SEED))
    out = case.run(random_chunks(requests, random.Random(SEED)))
    for request in requests:
        ours = torch.stack([out[token] for token in request.prompt_ids])
        torch.testing.assert_close(ours, case.expected(request), rtol=0, atol=3e-6 * max(size, 3))


@pytest.mark.parametrize("kv_type", [torch.float16, torch.int8])
def test_infinite_value_does_not_affect_earlier_tokens(cpu_kernels: Path, kv_type: torch.dtype) -> None:
    """Earlier tokens in the same tile get the same bits as without the infinite value."""
    shape = Shape(1, 2, 32)
    rows = random_rows(shape)
    rows[6, -shape.head_dim :] = 1e6 if kv_type is torch.float16 else torch.inf
    together, alone = (Case.recorded(shape, rows, cpu_kernels, kv_type) for _ in range(2))
    first, second = (sequence(n, range(20), [5, 9]) for n in (1, 2))
    tile = together.run(iter([[(first, 8)]]))
    single = alone.run(iter([[(second, 1)] for _ in range(6)]))
    assert all(torch.equal(tile[token], single[token]) for token in range(6))


@pytest.mark.parametrize(("kv_type", "group"), [(torch.float16, 8), (torch.int8, 1)])
@pytest.mark.parametrize("spread", [2.0, 40.0])
def test_sinks_are_part_of_the_softmax(cpu_kernels: Path, kv_type: torch.dtype, group: int, spread: float) -> None:
    """With a wide spread, the sinks of some heads exceed all scores by far, and the outputs of these heads are 0."""
    check_all_chunkings(Shape(2, group, 64, window=90, sinks=spread), cpu_kernels, kv_type)
