"""Measure attention over the KV cache: decode against memory bandwidth, prefill against the matrix units."""

from collections.abc import Callable, Iterator

import torch

from engine.config import BLOCK_SIZE
from engine.kernels.attention_tiles import TileQueries, Tiles, decode_tiles, query_tiles, tile_queries
from engine.kernels.paged_attention import arrival_counts, paged_attention
from engine.kernels.reference import ScoreRule
from engine.model_config import ModelConfig
from tests.gpu.figures import Figure, fraction
from tests.gpu.machine import Machine
from tests.kernels.shapes import LLAMA_8B, QWEN_32B, TINY, mixer_of

LONG = 32768
MODELS = {"8B": LLAMA_8B, "32B": QWEN_32B}
KV_TYPES = {"bf16": torch.bfloat16, "fp8": torch.uint8}


def figures(machine: Machine) -> Iterator[Figure]:
    if machine.dry:
        yield _decoding(machine, "tiny", TINY, torch.bfloat16, 2, 40)
        yield _reading(machine, "tiny", TINY, 20, 40)
        return
    for name, model in MODELS.items():
        for kind, dtype in KV_TYPES.items():
            for requests in (1, 8):
                yield _decoding(machine, f"{name}, {kind}", model, dtype, requests, LONG)
        yield _decoding(machine, f"{name}, bf16", model, torch.bfloat16, 32, 1024)
        yield _reading(machine, name, model, 2048, 2048)
        yield _reading(machine, name, model, 2048, LONG)


def _queries(machine: Machine, model: ModelConfig) -> TileQueries:
    return tile_queries(model.attentions, machine.card, deterministic=False)


def _decoding(
    machine: Machine, name: str, model: ModelConfig, dtype: torch.dtype, requests: int, context: int
) -> Figure:
    queries = _queries(machine, model)
    tiles = decode_tiles(requests, context, queries).to(machine.device)
    nbytes = 2 * requests * context * mixer_of(model).kv_width * dtype.itemsize
    calls = [_call(machine, model, dtype, requests, 1, context, tiles) for _ in range(machine.copies(nbytes))]
    rate = nbytes / machine.seconds(calls)
    title = f"decode, {name}, {requests} of {context} tokens"
    return Figure(
        title, rate / 1e9, "GB/s", fraction(rate, machine.peaks.copy), "copy", 0.75 if context == LONG else None
    )


def _reading(machine: Machine, name: str, model: ModelConfig, tokens: int, context: int) -> Figure:
    """Measure the last `tokens` of a prompt."""
    queries = _queries(machine, model)
    tiles = query_tiles([0, tokens], [context], queries).to(machine.device)
    seconds = machine.seconds([_call(machine, model, torch.bfloat16, 1, tokens, context, tiles)])
    seen = tokens * (context - tokens) + tokens * (tokens + 1) // 2
    rate = 4 * mixer_of(model).width * seen / seconds
    title = f"prompt, {name}, {tokens} of {context} tokens"
    return Figure(title, rate / 1e12, "TFLOP/s", fraction(rate, machine.peaks.bfloat16), "bf16 peak")


def _call(
    machine: Machine, model: ModelConfig, dtype: torch.dtype, requests: int, tokens: int, context: int, tiles: Tiles
) -> Callable[[], object]:
    """Return a call of the kernel for requests whose blocks are scattered in the call's own pool."""
    device, mixer = machine.device, mixer_of(model)
    blocks = -(-context // BLOCK_SIZE)
    pool = torch.randn(1 + requests * blocks, 2, mixer.kv_heads, BLOCK_SIZE, mixer.head_dim, device=device)
    pool = pool.bfloat16() if dtype == torch.bfloat16 else pool.to(torch.float8_e4m3fn).view(torch.uint8)
    tables = (1 + torch.randperm(requests * blocks, device=device)).int().view(requests, blocks)
    q = torch.randn(requests * tokens, mixer.heads, mixer.head_dim, device=device).bfloat16()
    starts = torch.arange(0, requests * tokens + 1, tokens, dtype=torch.int32, device=device)
    contexts = torch.full((requests,), context, dtype=torch.int32, device=device)
    rule, arrivals = ScoreRule(mixer.head_dim**-0.5), arrival_counts(machine.card, device)
    return lambda: paged_attention(
        q, pool, tables, starts, contexts, tiles, rule, arrivals=arrivals, card=machine.card, deterministic=False
    )
