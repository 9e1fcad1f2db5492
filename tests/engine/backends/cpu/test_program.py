"""The check of a recorded program: an instruction that could access memory outside its regions is rejected."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.cpu.instructions import INSTRUCTION, Limits, Op
from engine.backends.cpu.operations import CpuOperations
from engine.backends.cpu.program import Program
from engine.batch import placeholder_batch
from engine.kv.cache import KVCache
from engine.mixer_config import DeltaConfig
from engine.model_config import Gate, NormKind, RopeConfig, Routing
from engine.operations import Attention, GatedMLP, HeadNorms, Norm, ShortConv
from engine.rope import rotary_table
from quant.cpu.arena import Arena
from quant.cpu.linear import CpuBackend
from quant.tensor import QTensor
from tests.engine.backends.cpu.recorded import cpu_group, layer, plain
from tests.engine.backends.cpu.test_delta_rule import random_delta
from tests.engine.backends.cpu.test_experts import Mixture
from tests.quant.cpu.random_weights import random_weight
from tests.support.kv_groups import kv_group, state_group

SEED = 9
LIMITS = Limits(tokens=12, outputs=12, requests=3, context=160, num_blocks=(20, 20, 20), threads=3)
WIDTH, HEADS = 96, kv_group((0, 1), 2, 32)
TAPS = 3
DELTA = DeltaConfig(4, 16, 32, 32, TAPS, tiled=True)
STATES = state_group((2,), (TAPS - 1) * 64), state_group((3,), DELTA.cache.elements)

NONE_AT_ZERO = ("order", "bias", "shared", "choice_bias", "expert_scale", "v_norm")
LONGER = ("single",)  # address of one row of a region of several
INSIDE = ((Op.DELTA, "gate"),)  # a part of a row, with others after it
ADDRESSES = (
    "x",
    "out",
    "weight",
    "up",
    "vector",
    "cache",
    "cosine",
    "sine",
    "partials",
    "q_norm",
    "k_norm",
    "settings",
    "gate",
    "rates",
    "rate",
    "ids",
    "weights",
    "row_of",
    "token_of",
    "orders",
    "blocks",
    *LONGER,
    *NONE_AT_ZERO,
)
DISTANCES = (
    "x_stride",
    "x_copy",
    "out_stride",
    "out_copy",
    "tile_bytes",
    "up_tile_bytes",
    "up_stride",
    "block_bytes",
    "norm_stride",
    "shared_stride",
    "gate_stride",
    "rates_stride",
)
COUNTS = (
    *("groups", "rows", "head_bytes", "kv_heads", "heads", "head_dim", "rotary_dim", "max_pieces"),
    *("words", "each", "experts", "choices", "expert_groups", "taps", "value_heads", "key_dim", "value_dim"),
)

MIXTURES = (
    Mixture(Routing(8, 3), ("Q4_0", "Q8_0", "Q4_1"), shared=64, gated=True, scaled=True),
    Mixture(Routing(16, 2, groups=4, active_groups=2), ("F16", "F16", "Q8_0"), bias=torch.randn(16)),
    Mixture(Routing(6, 2), ("int4 g32 zeros 1",) * 3),
)

pytestmark = pytest.mark.usefixtures("every_layout")

Call = tuple[Op, dict[str, int]]


class Recorder(Program):
    """Records instructions, so that a test can append them again with a changed word."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena, LIMITS)
        self.calls: list[Call] = []

    def append(self, op: Op, **words: int) -> None:
        self.calls.append((op, {name: int(word) for name, word in words.items()}))
        super().append(op, **words)


@pytest.fixture(scope="module", params=[torch.float16, torch.int8])
def recorded(request: pytest.FixtureRequest, every_layout: Path) -> Recorder:
    """A program with every operation, over weights of all kinds."""
    rng, arena = np.random.default_rng(SEED), Arena()

    def weight(name: str, rows: int, columns: int) -> QTensor:
        return random_weight(name, rows, columns, rng)

    kv = KVCache([cpu_group(HEADS, request.param), *STATES], LIMITS.num_blocks)
    for pool in kv.pools:
        arena.adopt("KV cache", pool.view(torch.uint8).flatten().numpy())
    program = Recorder(arena)
    ops, batch = CpuOperations(CpuBackend(arena), program), placeholder_batch()
    rotary = rotary_table(RopeConfig(10000.0, 32, interleaved=True), None, LIMITS.context)
    own = (Norm(torch.randn(2, 32), 1e-5), Norm(torch.randn(2, 32), 1e-5, NormKind.LAYER))
    attentions = (
        Attention(32**-0.5, rotary),
        Attention(32**-0.5, rotary, HeadNorms(*own), softcap=5.0, window=20),
    )
    spread = rotary_table(RopeConfig(10000.0, 16, interleaved=False, span=32), None, LIMITS.context)
    normed_heads = HeadNorms(*(Norm(torch.randn(32), 1e-5) for _ in range(3)))
    values = Attention(1.0, spread, normed_heads)
    x = ops.embed(batch, layer(ops, plain(torch.randn(50, WIDTH))))
    for number in range(2):
        normed = ops.norm(x, Norm(torch.randn(WIDTH), 1e-5))
        segments = [weight(name, rows, WIDTH) for name, rows in (("Q4_0", 64), ("Q8_0", 64), ("F16", 64))]
        qkv = ops.linear(normed, layer(ops, *segments), bias=torch.randn(192))
        if number == 0:
            q = ops.rope_and_store(ops.linear(normed, layer(ops, *segments)), batch, kv.layer(0), values)
            own_queries = ops.linear(normed, layer(ops, weight("Q8_0", 64, WIDTH)))
            shared = replace(values, shared=True)
            q = ops.rope_and_store(own_queries, batch, kv.layer(0), shared)
            x = ops.linear(ops.attend(q, batch, kv.layer(0), shared), layer(ops, weight("Q4_1", WIDTH, 64)), x)
            parts, total = (ops.linear(normed, layer(ops, weight("Q8_0", 2 * WIDTH, WIDTH))) for _ in range(2))
            parts = ops.norm(parts, Norm(torch.randn(32), 1e-5, sum_scale=0.5), total)
            gated = ops.gate_part(ops.linear(normed, layer(ops, weight("Q8_0", WIDTH, WIDTH))), parts, 1, Gate.GELU)
            x = ops.linear(gated, layer(ops, weight("Q8_0", WIDTH, WIDTH)), x)
            gates = ops.linear(normed, layer(ops, weight("Q4_0", 64, WIDTH)))
            convolved = ops.convolve(qkv, batch, kv.state(2), ShortConv(torch.randn(TAPS, 64)))
            x = ops.linear(ops.scale(convolved, gates), layer(ops, weight("Q4_1", WIDTH, 64)), x)
            inputs = ops.linear(normed, layer(ops, weight("Q8_0", DELTA.in_width, WIDTH)))
            mixed = ops.delta_rule(inputs, batch, kv.state(3), random_delta(DELTA))
            x = ops.linear(mixed, layer(ops, weight("Q4_1", WIDTH, DELTA.width)), x)
        q = ops.rope_and_store(qkv, batch, kv.layer(number), attentions[number])
        attended = ops.attend(q, batch, kv.layer(number), attentions[number])
        if number == 1:
            attended, x = ops.select(attended, batch), ops.select(x, batch)
        x = ops.linear(attended, layer(ops, weight("Q4_1", WIDTH, 64)), x)
        normed = ops.norm(x, Norm(torch.randn(WIDTH), 1e-5, NormKind.LAYER, torch.randn(WIDTH)))
        gate_up = layer(ops, weight("Q4_1", 64, WIDTH), weight(("Q8_0", "F16")[number], 64, WIDTH))
        x = ops.gated_mlp(normed, GatedMLP(gate_up, layer(ops, weight("Q4_0", WIDTH, 64))), x)
        for mixture in MIXTURES[:1] if number == 0 else MIXTURES[1:]:
            mlp = mixture.make(ops)
            x = ops.experts(normed, ops.route(normed, mlp.router), mlp, x)
    x = ops.linear(x, layer(ops, weight("int4 g32 zeros 1", WIDTH, WIDTH)))
    ops.logits(x, layer(ops, weight("Q8_0", 50, WIDTH)))
    return program


def finish(recorded: Recorder, number: int, **changed: int) -> None:
    """Check the program with some words of one instruction changed."""
    forged = Program(recorded.arena, LIMITS)
    for index, (op, words) in enumerate(recorded.calls):
        forged.append(op, **(words | changed if index == number else words))
    forged.finish()


def region_of(recorded: Recorder, address: int) -> tuple[int, int]:
    """Return the start and the end of the region that contains an address."""
    return next(span for span in recorded.arena.address_ranges().ranges if span[0] <= address < span[1])


def words_of(recorded: Recorder, names: tuple[str, ...]) -> list[tuple[int, Op, str, int]]:
    """Return (instruction, operation, word, value) for every nonzero word with one of these names."""
    return [
        (number, op, name, words[name])
        for number, (op, words) in enumerate(recorded.calls)
        for name in names
        if words.get(name)
    ]


def test_recorded_program_passes_the_check(recorded: Recorder) -> None:
    assert {op for op, _ in recorded.calls} == set(Op)
    program = recorded.finish()
    assert len(program) == len(recorded) == len(recorded.calls)
    for row, (op, words) in zip(program, recorded.calls, strict=True):
        assert row["op"] == op
        named: dict[str, Any] = {name: int(row[name]) for name in words}
        assert named == words


def test_address_outside_its_region_is_rejected(recorded: Recorder) -> None:
    """Each address is replaced in turn: by one before its region, at its end, after it, and elsewhere."""
    for number, op, name, address in words_of(recorded, ADDRESSES):
        first, end = region_of(recorded, address)
        optional = name in (*NONE_AT_ZERO, "single") or (op, name) == (Op.ORDER_ROWS, "token_of")
        nowhere = (1 if optional else 0, 64, -address, address + (1 << 40))
        for forged in (first - 64, first - 1, end - 1, end, *nowhere):
            with pytest.raises(IndexError, match=rf"instruction {number} \({op.name}\): {name}"):
                finish(recorded, number, **{name: forged})


def test_checked_extents_are_exact(recorded: Recorder) -> None:
    """Every kind of address has an instruction whose extent ends exactly where its region ends.

    Moving such an address by a cache line is rejected.
    """
    moved = set()
    for number, op, name, address in words_of(recorded, ADDRESSES):
        try:
            finish(recorded, number, **{name: address + 64})
        except IndexError:
            moved.add((op, name))
    exact = {(op, name) for _, op, name, _ in words_of(recorded, ADDRESSES) if name not in LONGER}
    assert moved >= exact - {*INSIDE}


def test_size_that_exceeds_its_region_is_rejected(recorded: Recorder) -> None:
    for number, op, name, value in words_of(recorded, DISTANCES + COUNTS):
        for factor in (1000, -1) if name in DISTANCES else (1000,):
            with pytest.raises(IndexError, match=rf"instruction {number} \({op.name}\)"):
                finish(recorded, number, **{name: factor * value})


def test_unknown_kv_group_is_rejected(recorded: Recorder) -> None:
    for number, op, _, _ in words_of(recorded, ("cache",)):
        for forged in (len(LIMITS.num_blocks), -1, 1 << 40):
            with pytest.raises(IndexError, match=rf"instruction {number} \({op.name}\): group"):
                finish(recorded, number, group=forged)


def test_invalid_window_and_rotary_dim_are_rejected(recorded: Recorder) -> None:
    """The window and the rotary dimension determine which table entries and elements compiled code reads."""
    for name, said, wrong in (
        ("window", "window", (0, -1, -(1 << 40))),
        ("rotary_dim", "(rotary_dim|cosine|distance)", (-2, 34)),
        ("distance", "(rotary_dim|distance)", (-1, 25)),
    ):
        for number, op, _, _ in words_of(recorded, (name,)):
            for forged in wrong:
                with pytest.raises(IndexError, match=rf"instruction {number} \({op.name}\): {said}"):
                    finish(recorded, number, **{name: forged})


def test_overlapping_heads_are_rejected(recorded: Recorder) -> None:
    for number, op, _, value in words_of(recorded, ("head_bytes",)):
        for forged in (value - 1, 0, -value):
            with pytest.raises(IndexError, match=rf"instruction {number} \({op.name}\): head_bytes"):
                finish(recorded, number, head_bytes=forged)


def test_buffers_for_smaller_limits_are_rejected(recorded: Recorder) -> None:
    """Buffers that fit one batch do not fit the next larger one."""
    numbers = ("tokens", "outputs", "context")
    others = {"requests": LIMITS.slots + 1}, {"num_blocks": (21,)}
    for larger in (*({name: getattr(LIMITS, name) + 1} for name in numbers), *others):
        program = Program(recorded.arena, replace(LIMITS, **larger))
        for op, words in recorded.calls:
            program.append(op, **words)
        with pytest.raises(IndexError):
            program.finish()


def test_unknown_instruction_word_is_rejected() -> None:
    with pytest.raises(KeyError, match="sped"):
        Program(Arena(), LIMITS).append(Op.NORM, sped=1)


def test_missing_words_are_zero_except_for_barrier() -> None:
    program = Program(Arena(), Limits(tokens=0, outputs=0, requests=0, context=0, num_blocks=(0,), threads=1))
    region = program.arena.allocate("out", 256)
    program.append(Op.ARGMAX_SEGMENTS, out=region.address, x=region.address)
    (row,) = program.finish()
    assert {name: int(row[name]) for name in INSTRUCTION.names or () if row[name]} == {
        "op": Op.ARGMAX_SEGMENTS, "barrier": 1, "out": region.address, "x": region.address,
    }  # fmt: skip
